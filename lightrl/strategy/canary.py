"""The end-to-end look at a weight sync: the engine generates a few tokens, and the trainer must score them the same.

It sees what a comparison of weights cannot: caches that older weights filled, weights that an engine keeps in another
layout, another temperature, another position of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightrl.engines.base import Completion, EnginePrompt, InferenceEngine, SamplingParams, WeightSyncError
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import Policy, predicting_positions, response_batch
from lightrl.records import EncodedPrompt

if TYPE_CHECKING:
    from lightrl.strategy.base import StrategyBase

_NUM_PROMPTS = 2  # every rank scores as many: a sharded forward is a collective
_NUM_TOKENS = 8
_FIRST_LENGTHS = (5, 9)  # of the prompts made up before any was seen
_ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # float32 engines are within 5e-5, bfloat16 ones within 0.15


class Canary:
    """Keeps a few prompts of the last rollout to generate from after a sync."""

    def __init__(self) -> None:
        self._prompts: list[EnginePrompt] = []

    def keep(self, prompts: Sequence[EnginePrompt]) -> None:
        """Those with images or videos first, since more can go wrong with them."""
        chosen = sorted(prompts, key=lambda prompt: not (prompt.images or prompt.videos))[:_NUM_PROMPTS]
        self._prompts = chosen or self._prompts

    def check(self, strategy: StrategyBase, actor: nn.Module, dtype: torch.dtype) -> float:
        """The difference on the rank where it is largest; WeightSyncError on all ranks if it is too large."""
        assert strategy.engine is not None
        with strategy.comm.phase("canary", local=True):
            prompts = self._usable(strategy, actor) or made_up_prompts(strategy.engine.engine)
            completions = strategy.engine.generate(prompts, [_params(strategy.engine.engine, item) for item in prompts])
            scored = [(prompts[i % len(prompts)], completions[i % len(prompts)]) for i in range(_NUM_PROMPTS)]
            encoded = _encoded(strategy.media, scored)
        theirs = _trainer_logprobs(strategy, actor, [completion for _, completion in scored], encoded)
        largest = float(strategy.comm.all_reduce(_nan_to_inf(_difference(theirs, completions, dtype)), "max"))
        if largest > _ALLOWED[dtype]:
            raise WeightSyncError(
                f"After the weight sync to version {strategy.engine.version} a logprob of the engine differs from the "
                f"trainer's by {largest:.3g} ({_ALLOWED[dtype]:g} is allowed), though every parameter was handed over "
                "as the trainer has it: the engine serves a cache of older weights, or computes something else."
            )
        return largest

    def _usable(self, strategy: StrategyBase, actor: nn.Module) -> list[EnginePrompt]:
        """Without a Policy and its processor there is nothing here to score an image with."""
        if isinstance(actor, Policy) and strategy.media is not None:
            return self._prompts
        return [prompt for prompt in self._prompts if not prompt.images and not prompt.videos]


def made_up_prompts(engine: InferenceEngine) -> list[EnginePrompt]:
    """Token ids spread over the vocabulary, placeholders left out."""
    special = {engine.image_token_id, engine.video_token_id}
    ids = [place * 7919 % engine.vocab_size for place in range(1, 40)]
    usable = [token for token in ids if token not in special]
    return [
        EnginePrompt(token_ids=tuple(usable[start : start + length])) for start, length in enumerate(_FIRST_LENGTHS)
    ]


def _params(engine: InferenceEngine, prompt: EnginePrompt) -> SamplingParams:
    room = engine.max_model_len - engine.num_prompt_tokens(prompt)
    return SamplingParams(max_new_tokens=max(1, min(_NUM_TOKENS, room)), ignore_eos=True)


def _encoded(media: MediaProcessor | None, scored: list[tuple[EnginePrompt, Completion]]) -> list[EncodedPrompt] | None:
    if media is None:
        return None
    found = [media.encode(prompt.token_ids, prompt.images, prompt.videos) for prompt, _ in scored]
    for ours, (_, theirs) in zip(found, scored, strict=True):
        if ours.token_ids != theirs.prompt_token_ids:
            raise ValueError(
                f"A prompt has {len(theirs.prompt_token_ids)} tokens in the engine and {len(ours.token_ids)} in the "
                "trainer: they expand its images in different ways. Give both the same processor settings."
            )
    return found


def _trainer_logprobs(
    strategy: StrategyBase, actor: nn.Module, completions: list[Completion], encoded: list[EncodedPrompt] | None
) -> list[Tensor]:
    pairs = [(item.prompt_token_ids, item.output_token_ids) for item in completions]
    if isinstance(actor, Policy):
        batch = response_batch(pairs, encoded=encoded).to(strategy.device)
        (scores,) = strategy.forward([batch], model=actor)
        return list(scores.logprobs.float().split([len(response) for _, response in pairs]))
    return [_scores_of_causal_lm(strategy, actor, *pair) for pair in pairs]


def _scores_of_causal_lm(strategy: StrategyBase, model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """For a transformers model that is trained as it is."""
    ids = torch.tensor([[*prompt, *response]], device=strategy.device)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    strategy.after_forward_only(model)
    chosen = torch.tensor(response, device=strategy.device)
    logits = logits[predicting_positions((0, ids.shape[1]), [len(response)])]
    return logits.float().log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def _difference(theirs: list[Tensor], completions: list[Completion], dtype: torch.dtype) -> float:
    """The largest of any logprob in float32; in bfloat16 the mean, since one may be far off where logits are large."""
    parts = [
        (scores.cpu() - torch.tensor(item.logprobs)).abs()
        for scores, item in zip(theirs, completions, strict=False)
        if item.logprobs
    ]
    if not parts:
        return 0.0
    return float(torch.cat(parts).max() if dtype == torch.float32 else torch.cat(parts).mean())


def _nan_to_inf(value: float) -> float:
    return value if value == value else float("inf")
