"""What each reward of a run gave to a sample, beside the sum of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightrl.records import Sample, ScoredGroup
from lightrl.rewards import NO_REWARD
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import Outcome, counted, has_reward


class ComponentKeeper:
    """Listens to the rewards of a run, and writes what each gave onto the samples."""

    def __init__(self, rewards: RewardSet) -> None:
        self._weights = {item.label: item.weight for item in rewards.rewards}
        self._failure_value = rewards.policy.value
        self._given: dict[int, dict[str, tuple[float, float]]] = {}  # by the id of the sample, while it is scored
        rewards.hear(self._note)

    def _note(self, label: str, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        for sample, outcome in zip(samples, outcomes, strict=True):
            value = counted(outcome, self._failure_value)
            pair = (self._weights[label], NO_REWARD if value is None else value)
            self._given.setdefault(id(sample), {})[label] = pair

    def forget(self) -> None:
        """Begins with other samples."""
        self._given = {}

    def completed(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Returns the groups with the values of each reward; raises ValueError where a workflow made one reward."""
        given, self._given = self._given, {}
        if (failure := self._failure_value) is not None:
            given = {key: _judged(values, failure) for key, values in given.items()}
        return [_with_components(group, given) for group in groups]


def _judged(values: dict[str, tuple[float, float]], failure: float) -> dict[str, tuple[float, float]]:
    """Returns the values of a sample; if no reward applies to it, all have failed, as in RewardSet.combine()."""
    if any(has_reward(value) for _, value in values.values()):
        return values
    return {label: (weight, failure) for label, (weight, _) in values.items()}


def _with_components(group: ScoredGroup, given: Mapping[int, Mapping[str, tuple[float, float]]]) -> ScoredGroup:
    if any(sample.is_scored for sample in group.samples):
        raise ValueError(
            "The workflow asks for the run's rewards itself and gives its episode one reward, and the advantage "
            "needs each reward by itself. Choose another --algorithm.advantage, or a workflow that leaves the "
            "rewards to the run."
        )
    samples = (replace(sample, components=given.get(id(sample), {})) for sample in group.samples)
    return replace(group, samples=tuple(samples))
