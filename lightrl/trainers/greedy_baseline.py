"""Estimators that compare a reward with that of a greedy response to the same prompt (ReMax, arXiv:2310.10505).

Nothing of it is entered by a run without such an estimator: it puts itself around the methods of one trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightrl.records import Sample, ScoredGroup
from lightrl.rollout.collector import Prompts


class GreedyBaseline:
    """Samples and scores a greedy response to each prompt beside the samples of the trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sample, self._score = trainer.sample, trainer.score
        self._greedy: list[Sample] = []  # one for each prompt that was sampled last

    def attach(self) -> None:
        """Has the trainer's groups bring their baselines from now on."""
        self._trainer.sample, self._trainer.score = self.sample, self.score

    def sample(self, prompts: Prompts) -> list[Sample]:
        """Samples as the trainer does, and a greedy response to each prompt before the engine goes to sleep."""
        trainer = self._trainer
        with trainer.strategy.serving.kept_awake():
            samples: list[Sample] = self._sample(prompts)
            with trainer.watch.measure("time/rollout"):
                self._greedy = trainer.collector.sample_greedily(prompts)
        return samples

    def score(self, samples: list[Sample]) -> list[ScoredGroup]:
        """Scores as the trainer does, and gives each group the reward of the greedy response to its prompt."""
        groups: list[ScoredGroup] = self._score(samples)
        with self._trainer.watch.measure("time/reward"):
            rewards = self._trainer.collector.score(self._greedy, self._trainer.statistics, prefix="greedy/")
        return [replace(group, baseline=reward) for group, reward in zip(groups, rewards, strict=True)]


def baselines_of(groups: Sequence[ScoredGroup]) -> list[float]:
    """Returns the baseline of each sample of the groups."""
    return [float(group.baseline or 0.0) for group in groups for _ in group.samples]
