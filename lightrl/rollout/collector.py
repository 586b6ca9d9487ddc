"""Turns prompts into scored samples: generation through the strategy, then rewards. Evaluation works the same way."""

from __future__ import annotations

from collections.abc import Sequence

from lightrl.data.media import read_media
from lightrl.data.sampler import shard
from lightrl.engines.base import Completion, EnginePrompt, SamplingParams
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample
from lightrl.rewards import AnyReward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import has_reward
from lightrl.rollout.scorer import Scorer
from lightrl.seeding import mix_seed
from lightrl.strategy import StrategyBase

_ROLLOUT_STREAM, _EVAL_STREAM = 1, 2  # keep the draws of training and evaluation apart

Prompts = Sequence[tuple[int, Prompt]]  # of this rank, each with its position in the step's global batch


class Collector:
    """Samples and scores this rank's prompts. Every rank calls each method, even with no prompt."""

    def __init__(
        self, strategy: StrategyBase, reward: AnyReward | RewardSet, *, seed: int, max_new_tokens: int
    ) -> None:
        self._strategy = strategy
        self._scorer = Scorer(strategy.comm, RewardSet.of(reward))
        self._seed = seed
        self._max_new_tokens = max_new_tokens

    def sample(
        self, prompts: Prompts, *, step: int, group_size: int, temperature: float, sleep_engine: bool = True
    ) -> list[Sample]:
        """Draws group_size samples of each prompt; the samples of a prompt are adjacent."""
        seeds = [mix_seed(_ROLLOUT_STREAM, self._seed, step, position) for position, _ in prompts]
        return self._generate(prompts, seeds, group_size, temperature, sleep_engine)

    def sample_greedily(self, prompts: Prompts) -> list[Sample]:
        """Generates the greedy response to each prompt."""
        return self._generate(prompts, [0] * len(prompts), 1, 0.0)

    def _generate(
        self, prompts: Prompts, seeds: list[int], n: int, temperature: float, sleep_engine: bool = True
    ) -> list[Sample]:
        params = [
            SamplingParams(max_new_tokens=self._max_new_tokens, temperature=temperature, n=n, seed=seed)
            for seed in seeds
        ]
        with self._strategy.comm.phase("reading images", local=True):
            requests = [_engine_prompt(prompt) for _, prompt in prompts]
        completions = self._strategy.generate(requests, params, sleep_engine=sleep_engine)
        owners = [owner for owner in prompts for _ in range(n)]
        return [self._sample(*owner, item) for owner, item in zip(owners, completions, strict=True)]

    def _sample(self, position: int, prompt: Prompt, completion: Completion) -> Sample:
        tokenizer, token_ids = self._strategy.tokenizer, completion.output_token_ids
        assert tokenizer is not None, "set strategy.tokenizer: rewards read text"
        return Sample(
            prompt=prompt,
            position=position,
            sample_index=completion.sample_index,
            response_ids=token_ids,
            sampler_logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=tokenizer.decode(list(token_ids), skip_special_tokens=True),
            prompt_ids=completion.prompt_token_ids,
        )

    def score(
        self, samples: Sequence[Sample], statistics: Statistics | None = None, *, prefix: str = ""
    ) -> list[float]:
        """Returns the reward of each sample, NO_REWARD where it failed; too many failures stop every rank."""
        return self._scorer.score(samples, statistics, prefix=prefix)

    def evaluate(self, prompts: Sequence[Prompt], *, temperature: float) -> dict[str, float]:
        """Samples each prompt once, over all ranks; the same draws at every evaluation make steps comparable.

        eval/reward is the mean reward, eval/accuracy the share of samples with a reward of 1 or more. Both are left out
        if no sample has a reward; without prompts there are no metrics.
        """
        if not prompts:
            return {}
        comm, statistics = self._strategy.comm, Statistics()
        mine = shard(list(enumerate(prompts)), comm.rank, comm.world)
        seeds = [mix_seed(_EVAL_STREAM, self._seed, position) for position, _ in mine]
        samples = self._generate(mine, seeds, 1, temperature)
        scored = self.score(samples, statistics, prefix="eval/")
        rewards = [reward for reward in scored if has_reward(reward)]
        if rewards:
            statistics.mean("eval/reward", sum(rewards), len(rewards))
            statistics.mean("eval/accuracy", sum(reward >= 1 for reward in rewards), len(rewards))
        statistics.mean("eval/response_tokens", sum(len(sample.response_ids) for sample in samples), len(samples))
        return statistics.reduce(comm)


def _engine_prompt(prompt: Prompt) -> EnginePrompt:
    if not prompt.images and not prompt.videos:
        return EnginePrompt(token_ids=prompt.token_ids)
    images, videos = read_media(prompt)
    return EnginePrompt(token_ids=prompt.token_ids, images=tuple(images), videos=tuple(videos))
