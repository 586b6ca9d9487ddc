"""The reward whose values must differ within a group (--dynamic_sampling.reward), beside the sum of all rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightrl.config import GRPOConfig, RolloutConfig
from lightrl.records import Sample, ScoredGroup
from lightrl.rewards import NO_REWARD
from lightrl.rewards.reward_set import RewardSet, is_collective
from lightrl.rewards.scoring import Outcome, counted


class DifferingReward:
    """Listens to one of the run's rewards, and replaces the sums of a group by its values."""

    def __init__(self, name: str, rewards: RewardSet) -> None:
        """Raises ValueError if no reward that each rank computes by itself has this name."""
        known = [item.label for item in rewards.rewards if not is_collective(item.reward)]
        if name not in known:
            raise ValueError(
                f"--dynamic_sampling.reward {name!r} is no reward of this run that each rank computes by itself. "
                f"There {'is ' if len(known) == 1 else 'are '}{', '.join(known) or 'none'}."
            )
        self._name = name
        self._failure_value = rewards.policy.value
        self._values: dict[Any, float | None] = {}  # by the sample's key and text
        rewards.hear(self._note)

    def _note(self, label: str, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        if label == self._name:
            for sample, outcome in zip(samples, outcomes, strict=True):
                self._values[sample.key, sample.text] = counted(outcome, self._failure_value)

    def forget(self) -> None:
        """Begins with other samples."""
        self._values.clear()

    def judged(self, group: ScoredGroup) -> ScoredGroup:
        """Returns the group with the values of this reward alone, if they are known and the group has a signal.

        A group to which that reward does not apply is returned with its sums.
        """
        told = [sample.judged for sample in group.samples if sample.judged is not None]
        if len(told) == len(group.samples):
            return _alone(group, told)
        if not (self._values and group.has_signal):
            return group
        pairs = zip(group.samples, group.rewards, strict=True)
        values = [self._values.get((sample.key, sample.text), reward) for sample, reward in pairs]
        if all(value is None for value in values):
            return _alone(group, group.rewards)
        return _alone(group, [NO_REWARD if value is None else value for value in values])

    def completed(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Returns the groups with what judged() says of them on their samples, for ranks that do not score."""
        return [_with_judgement(group, self.judged(group).rewards) for group in groups]


def _alone(group: ScoredGroup, values: Sequence[float]) -> ScoredGroup:
    """Returns the group with these rewards, and without those that an estimator would compare one by one."""
    samples = tuple(replace(sample, components={}) if sample.components else sample for sample in group.samples)
    return replace(group, samples=samples, rewards=tuple(values))


def _with_judgement(group: ScoredGroup, values: Sequence[float]) -> ScoredGroup:
    samples = (replace(sample, judged=value) for sample, value in zip(group.samples, values, strict=True))
    return replace(group, samples=tuple(samples))


def differing_reward_of(config: RolloutConfig, rewards: RewardSet) -> DifferingReward | None:
    """Returns a listener to the reward that must differ, if the run names one."""
    name = config.dynamic_sampling.reward if isinstance(config, GRPOConfig) else ""
    return DifferingReward(name, rewards) if name else None
