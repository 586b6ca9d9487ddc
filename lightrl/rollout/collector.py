"""Prompts to scored samples: generation through the strategy, then rewards, then advantages."""

from __future__ import annotations

from collections.abc import Sequence

from lightrl.data.media import read_media
from lightrl.engines.base import SamplingParams
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample
from lightrl.rewards import AnyReward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.scorer import Scorer
from lightrl.seeding import mix_seed
from lightrl.strategy import StrategyBase

_ROLLOUT_STREAM, _EVAL_STREAM = 1, 2  # keep the draws of training and evaluation apart


class Collector:
    """Rolls out and scores this rank's prompts. Every rank calls it, also one that has none."""

    def __init__(
        self, strategy: StrategyBase, reward: AnyReward | RewardSet, *, seed: int, max_new_tokens: int
    ) -> None:
        self._strategy = strategy
        self._scorer = Scorer(strategy.comm, RewardSet.of(reward))
        self._seed = seed
        self._max_new_tokens = max_new_tokens

    def sample(
        self, prompts: Sequence[tuple[int, Prompt]], *, step: int, group_size: int, temperature: float
    ) -> list[Sample]:
        """group_size samples of each (position in the step, prompt), a group's samples adjacent."""
        seeds = [mix_seed(_ROLLOUT_STREAM, self._seed, step, position) for position, _ in prompts]
        return self._generate(prompts, seeds, group_size, temperature, sleep_engine=True)

    def sample_for_eval(self, prompts: Sequence[tuple[int, Prompt]], *, temperature: float) -> list[Sample]:
        """One sample of each prompt; the same draws at every evaluation, so that steps compare."""
        seeds = [mix_seed(_EVAL_STREAM, self._seed, position) for position, _ in prompts]
        return self._generate(prompts, seeds, 1, temperature, sleep_engine=True)

    def _generate(
        self, prompts: Sequence[tuple[int, Prompt]], seeds: list[int], n: int, temperature: float, *, sleep_engine: bool
    ) -> list[Sample]:
        params = [
            SamplingParams(max_new_tokens=self._max_new_tokens, temperature=temperature, n=n, seed=seed)
            for seed in seeds
        ]
        with self._strategy.comm.phase("reading images", local=True):
            media = [read_media(prompt) for _, prompt in prompts]
        items = self._strategy.gather_and_generate(
            params,
            all_prompt_token_ids=[list(prompt.token_ids) for _, prompt in prompts],
            all_images=[images for images, _ in media],
            all_videos=[videos for _, videos in media],
            sleep_engine=sleep_engine,
        )
        owners = [owner for owner in prompts for _ in range(n)]
        return [
            Sample(
                prompt=prompt,
                position=position,
                sample_index=item.sample_index,
                response_ids=tuple(item.output_token_ids),
                sampler_logprobs=tuple(item.logprobs),
                versions=tuple(item.versions),
                finish_reason=item.finish_reason,
                text=item.text,
                prompt_ids=tuple(item.prompt_token_ids),
            )
            for (position, prompt), item in zip(owners, items, strict=True)
        ]

    def score(
        self, samples: Sequence[Sample], statistics: Statistics | None = None, *, prefix: str = ""
    ) -> list[float]:
        """The reward of each sample, NO_REWARD where it has failed; too many failures stop every rank."""
        return self._scorer.score(samples, statistics, prefix=prefix)

    def greedy_rewards(
        self, prompts: Sequence[tuple[int, Prompt]], *, group_size: int, statistics: Statistics | None = None
    ) -> list[float]:
        """The reward of a greedy response to each prompt, once for every sample of its group."""
        greedy = self._generate(prompts, [0] * len(prompts), 1, 0.0, sleep_engine=True)
        scored = self.score(greedy, statistics, prefix="greedy/")
        return [reward for reward in scored for _ in range(group_size)]
