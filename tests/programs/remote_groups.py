"""Scored groups of one sample, as ranks that generate send them."""

from made_samples import made_sample

from lightrl.records import Prompt, ScoredGroup

PROMPTS = [Prompt(index=index, text=str(index), token_ids=(index,)) for index in range(4)]


def group(prompt: int, position: int, reward: float) -> ScoredGroup:
    """Returns the group of a prompt, by its index, at a position of step 2."""
    sample = made_sample(
        prompt=PROMPTS[prompt], position=position, response_ids=(7,), sampler_logprobs=(-0.1,), versions=(2,), text="x"
    )
    return ScoredGroup(samples=(sample,), rewards=(reward,), step=2)
