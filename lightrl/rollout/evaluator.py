"""Accuracy on held-out prompts. It only reads: no training state changes."""

from __future__ import annotations

from collections.abc import Sequence

from lightrl.data.sampler import DistributedEvalSampler
from lightrl.metrics import Statistics
from lightrl.records import Prompt
from lightrl.rewards.scoring import has_reward
from lightrl.rollout.collector import Collector
from lightrl.strategy import StrategyBase


class Evaluator:
    """Each rank samples its share once; sums and counts are reduced, so the world size does not matter."""

    def __init__(
        self, strategy: StrategyBase, collector: Collector, prompts: Sequence[Prompt], *, temperature: float
    ) -> None:
        self._strategy = strategy
        self._collector = collector
        self._prompts = prompts
        self._temperature = temperature

    def evaluate(self) -> dict[str, float]:
        """eval/reward is the mean reward, eval/accuracy the share of samples with a reward of 1 or more.

        Both are left out where no sample has a reward.
        """
        comm = self._strategy.comm
        mine = DistributedEvalSampler(len(self._prompts), rank=comm.rank, world=comm.world)
        places = [(place, self._prompts[place]) for place in mine]
        samples = self._collector.sample_for_eval(places, temperature=self._temperature)
        statistics = Statistics()
        scored = self._collector.score(samples, statistics, prefix="eval/")
        rewards = [reward for reward in scored if has_reward(reward)]
        if rewards:
            statistics.mean("eval/reward", sum(rewards), len(rewards))
            statistics.mean("eval/accuracy", sum(reward >= 1 for reward in rewards), len(rewards))
        statistics.mean("eval/response_tokens", sum(len(sample.response_ids) for sample in samples), len(samples))
        return statistics.reduce(comm)
