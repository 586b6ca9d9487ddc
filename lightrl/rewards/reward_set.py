"""The rewards of a run: several by name, each with a weight and parameters, added up for each sample."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.config import JudgeConfig, RolloutConfig, nearest_name
from lightrl.records import Sample
from lightrl.rewards.failures import NO_REWARD, FailureBudget, Outcome, RewardError
from lightrl.rewards.kinds import AnyReward, reward_name
from lightrl.rewards.loading import load_reward
from lightrl.rewards.scoring import RewardRunner, ScoringLimits

_TAKEN = ("mean", "equal_groups", "failures", "no_verdict", "overlong_penalty")  # reward/... metrics of the run itself


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """What becomes of samples whose reward failed."""

    max_failures: int = 0
    value: float | None = None  # that the failed reward counts as; None leaves the sample without a reward


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One of the run's rewards."""

    label: str  # of its metric, reward/<label>
    weight: float
    reward: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the rewards make of some samples."""

    rewards: list[float]  # weighted sums; NO_REWARD where one has failed
    components: Mapping[str, list[float]]  # by label: those that the reward gave, without the failed ones


class RewardSet:
    """Built before anything expensive, so that a wrong name, parameter or signature costs nothing."""

    def __init__(
        self,
        rewards: Sequence[WeightedReward],
        *,
        limits: ScoringLimits | None = None,
        policy: FailurePolicy | None = None,
    ) -> None:
        self.rewards = list(rewards)
        self.policy = policy or FailurePolicy()
        _check_labels([item.label for item in rewards])
        self._runners = {
            item.label: RewardRunner(item.reward, limits, name=item.label)
            for item in rewards
            if not is_collective(item.reward)
        }

    @classmethod
    def of(cls, reward: AnyReward | RewardSet) -> RewardSet:
        """A single reward as a set of one."""
        if isinstance(reward, RewardSet):
            return reward
        return cls([WeightedReward(label=reward_name(reward), weight=1.0, reward=reward)])

    @classmethod
    def from_config(cls, config: RolloutConfig, own: AnyReward | None = None) -> RewardSet:
        """Those that the config names, or one's own in their place."""
        if own is None:
            rewards = _named_rewards(config)
        elif config.reward_args:
            raise ValueError(
                "--reward_args are given, but the reward is an object of your own: give it its parameters."
            )
        else:
            rewards = [WeightedReward(label=_label(reward_name(own)), weight=1.0, reward=own)]
        limits = ScoringLimits(
            timeout_s=config.reward_timeout_s, concurrency=config.reward_concurrency, num_workers=config.reward_workers
        )
        value = None if config.reward_failure_value == "exclude" else float(config.reward_failure_value)
        return cls(rewards, limits=limits, policy=FailurePolicy(max_failures=config.max_reward_failures, value=value))

    def prepare(self, strategy: Any) -> None:
        """Loads what is spread over the ranks; every rank calls it."""
        for item in self.rewards:
            if is_collective(item.reward):
                item.reward.prepare(strategy)

    def run(self, label: str, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """The outcomes of one reward that is not collective."""
        return self._runners[label].run(samples, budget)

    def combine(self, outcomes: Mapping[str, Sequence[Outcome]], count: int) -> Scores:
        """The weighted sums of what run() gave for each label."""
        totals = [0.0] * count
        components: dict[str, list[float]] = {}
        missing = NO_REWARD if self.policy.value is None else self.policy.value
        for item in self.rewards:
            given = outcomes[item.label]
            components[item.label] = [outcome for outcome in given if not isinstance(outcome, RewardError)]
            for place, outcome in enumerate(given):
                totals[place] += item.weight * (missing if isinstance(outcome, RewardError) else outcome)
        return Scores(rewards=totals, components=components)

    def close(self) -> None:
        """Ends worker processes."""
        for runner in self._runners.values():
            runner.close()


def is_collective(reward: Any) -> bool:
    """Whether all ranks must score together, as by a model that is spread over them."""
    return bool(getattr(reward, "is_collective", False))


def _named_rewards(config: RolloutConfig) -> list[WeightedReward]:
    named = [_split_weight(text) for text in config.reward]
    labels = [_label(name) for name, _ in named]
    _check_labels(labels)
    parameters = _parameters_by_label(config.reward_args, labels)
    if "judge" in labels:
        parameters["judge"]["settings"] = config.judge
    elif config.judge != JudgeConfig():
        raise ValueError("--judge options are given, but judge is not among --reward.")
    if "reward_model" in labels:
        parameters["reward_model"] |= {"path": config.reward_model, "trust_remote_code": config.trust_remote_code}
    elif config.reward_model:
        raise ValueError(f"--reward_model {config.reward_model} is given, but reward_model is not among --reward.")
    return [
        WeightedReward(label=label, weight=weight, reward=load_reward(name, parameters[label]))
        for label, (name, weight) in zip(labels, named, strict=True)
    ]


def _split_weight(text: str) -> tuple[str, float]:
    """name or name=weight."""
    name, separator, weight = text.rpartition("=")
    if not separator:
        return text, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value) or value == 0:
        raise ValueError(f"--reward {text!r}: behind = there must be a weight, a number other than 0.")
    return name, value


def _label(name: str) -> str:
    """What stands in metrics: of a path its last part."""
    return name.rpartition(":")[2].rpartition(os.sep)[2]


def _check_labels(labels: Sequence[str]) -> None:
    if not labels:
        raise ValueError("--reward names no reward. Give one, such as exact_match.")
    for place, label in enumerate(labels):
        if label in labels[:place]:
            raise ValueError(f"--reward has two rewards named {label!r}, whose metrics would be one. Rename one.")
        if label in _TAKEN:
            raise ValueError(f"A reward cannot be named {label!r}: reward/{label} is another metric. Rename it.")


def _parameters_by_label(items: Sequence[str], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """From reward.parameter=value texts, which name the reward by its label."""
    found: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for item in items:
        path, separator, value = item.partition("=")
        label, dot, key = path.partition(".")
        if not separator or not dot or not key.isidentifier():
            raise ValueError(
                f"--reward_args {item!r}: it must be reward.parameter=value, without spaces around the sign."
            )
        if label not in found:
            raise ValueError(f"--reward_args {item!r}: --reward has no {label!r}. {nearest_name(label, set(labels))}")
        if key in found[label]:
            raise ValueError(f"--reward_args: {label}.{key} is given twice.")
        found[label][key] = value
    return found
