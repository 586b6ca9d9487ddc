"""Metrics of a policy from several samples of each prompt: pass@k and means, also for each source of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightrl.comm import found_world
from lightrl.metrics import Statistics
from lightrl.records import ScoredGroup, inner_value
from lightrl.rewards.scoring import has_reward


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the chance that k samples drawn without replacement include a right one (arXiv:2107.03374, eq. 1).

    It is 1 - C(n - c, k) / C(n, k) for c right samples of n. This is unbiased: its expectation is the chance that k new
    samples include a right one.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} samples with {num_correct} right ones: k must be between 1 and the number of "
            "samples, and the right ones at most all of them."
        )
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def evaluate(groups: Sequence[ScoredGroup], *, ks: Sequence[int] = (), source_field: str = "") -> dict[str, float]:
    """Returns metrics over the finished groups of all ranks; every rank calls it with its own. Nothing is sampled.

    accuracy is the share of samples with a reward of 1 or more, and reward is the mean reward. Both are means over
    prompts, so a prompt with some failed rewards weighs as much as the others. avg@n is the accuracy of n samples.
    pass@k leaves out prompts with fewer than k rewards.

    Args:
        groups: The samples of each prompt with their rewards, NaN for a failed one.
        ks: The values of k for pass@k.
        source_field: The field of a prompt that names its source; the metrics are also given for each source.
    """
    statistics = Statistics()
    describe_groups(groups, statistics, ks=ks, source_field=source_field)
    samples = [sample for group in groups for sample in group.samples]
    statistics.mean("turns", sum(len(sample.turns) for sample in samples), len(samples))
    for name in sorted({name for sample in samples for name in sample.numbers}):
        statistics.add(name, math.fsum(sample.numbers.get(name, 0.0) for sample in samples))
    return statistics.reduce(found_world())


def describe_groups(
    groups: Sequence[ScoredGroup],
    statistics: Statistics,
    *,
    ks: Sequence[int],
    source_field: str,
    prefix: str = "",
) -> None:
    """Adds the reward metrics of this rank's groups to statistics, under names that begin with prefix."""
    for group in groups:
        rewards = [reward for reward in group.rewards if has_reward(reward)]
        if not rewards:
            continue
        for start in prefixes_of(group, source_field, prefix):
            _describe(rewards, len(group.rewards), statistics, ks, start)


def prefixes_of(group: ScoredGroup, source_field: str, prefix: str) -> list[str]:
    """Returns how the names of a group's metrics begin: with prefix, and if there is a source with that, too."""
    if not source_field:
        return [prefix]
    found = inner_value(group.samples[0].prompt.fields, source_field)
    return [prefix, f"{prefix}{'other' if found is None else found}/"]


def _describe(rewards: Sequence[float], size: int, statistics: Statistics, ks: Sequence[int], prefix: str) -> None:
    num_correct = sum(reward >= 1 for reward in rewards)
    statistics.mean(f"{prefix}accuracy", num_correct / len(rewards), 1)
    statistics.mean(f"{prefix}reward", math.fsum(rewards) / len(rewards), 1)
    if size > 1:
        statistics.mean(f"{prefix}avg@{size}", num_correct / len(rewards), 1)
    for k in ks:
        if k <= len(rewards):
            statistics.mean(f"{prefix}pass@{k}", pass_at_k(len(rewards), num_correct, k), 1)
