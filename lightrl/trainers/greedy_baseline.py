"""Estimators that compare a reward with a greedy response's to the same prompt (ReMax, arXiv:2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightrl.records import ScoredGroup
from lightrl.rollout.collector import Prompts


def with_baselines(trainer: Any, prompts: Prompts) -> list[ScoredGroup]:
    """Makes a trainer's groups, and adds to each the reward of a greedy response to its prompt.

    The trainer samples as usual, and the greedy responses are generated before the engine goes to sleep.
    """
    with trainer.strategy.serving.kept_awake():
        samples = trainer.sample(prompts)
        with trainer.watch.measure("time/rollout"):
            greedy = trainer.collector.sample_greedily(prompts)
    groups: list[ScoredGroup] = trainer.score(samples)
    with trainer.watch.measure("time/reward"):
        rewards = trainer.collector.score(greedy, trainer.statistics, prefix="greedy/")
    return [replace(group, baseline=reward) for group, reward in zip(groups, rewards, strict=True)]


def baselines_of(groups: Sequence[ScoredGroup]) -> list[float]:
    """Returns the baseline of each sample of the groups."""
    return [float(group.baseline or 0.0) for group in groups for _ in group.samples]
