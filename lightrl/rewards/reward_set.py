"""The rewards of a run: loaded by name, each with a weight and parameters, and summed for each sample."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

from lightrl.config import JudgeConfig, RolloutConfig, declared_type, fits, named_values, nearest_name
from lightrl.imports import load_object
from lightrl.records import Sample
from lightrl.rewards.applicability import Condition, SelectiveRunner, SelectiveTogether, conditions_of, fail_unjudged
from lightrl.rewards.async_scoring import AsyncRunner
from lightrl.rewards.own_runner import OwnRunner
from lightrl.rewards.scoring import (
    NO_REWARD,
    AnyReward,
    FailureBudget,
    Outcome,
    OwnRewards,
    RewardError,
    RewardRunner,
    ScoringLimits,
    kind_of,
    reward_name,
)
from lightrl.rewards.unit_scoring import UnitRunner
from lightrl.rewards.worker_pool import IsolatedRunner

BUILTIN_REWARDS = {
    "exact_match": "lightrl.rewards.text_match:exact_match",
    "contains": "lightrl.rewards.text_match:contains",
    "last_number": "lightrl.rewards.text_match:last_number",
    "math": "lightrl.rewards.math_answer:MathAnswer",
    "format": "lightrl.rewards.response_format:ResponseFormat",
    "length": "lightrl.rewards.response_length:ResponseLength",
    "code": "lightrl.rewards.code_tests:CodeTests",
    "reward_model": "lightrl.rewards.model_reward:ModelReward",
    "judge": "lightrl.rewards.judge:Judge",
    "reasoning_gym": "lightrl.rewards.reasoning_gym:ReasoningGym",
    "episode": "lightrl.rewards.episode_reward:episode_reward",
}
# Kinds of parameters that --reward_args sets, of a function and of a class.
_OF_FUNCTION: tuple[Any, ...] = (inspect.Parameter.KEYWORD_ONLY,)
_SETTABLE = {False: _OF_FUNCTION, True: (*_OF_FUNCTION, inspect.Parameter.POSITIONAL_OR_KEYWORD)}
_TAKEN = ("mean", "equal_groups", "failures", "no_verdict", "overlong_penalty")  # reward/... metrics of the run itself


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """The treatment of samples whose reward failed."""

    max_failures: int = 0
    value: float | None = None  # value of a failed reward; None leaves the sample without a reward


_NO_LIMITS, _STRICT = ScoringLimits(), FailurePolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One of the run's rewards."""

    label: str  # its metric is reward/<label>
    weight: float
    reward: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The rewards of some samples."""

    rewards: list[float]  # weighted sums of the rewards that apply; NO_REWARD if one has failed
    components: Mapping[str, list[float]]  # by label: the numbers that each reward has given


class RewardSet:
    """The rewards of a run. It is built before anything expensive, so a wrong name or parameter raises at once."""

    conditions: Mapping[str, Condition] = {}  # by label: which records a reward is for; it is for all if it has none

    def __init__(
        self, rewards: Sequence[WeightedReward], *, limits: ScoringLimits = _NO_LIMITS, policy: FailurePolicy = _STRICT
    ) -> None:
        self.rewards, self.policy, self.limits = list(rewards), policy, limits
        _check_labels([item.label for item in rewards])
        alone = [item for item in rewards if not is_collective(item.reward)]
        self._runners = {item.label: make_runner(item.reward, limits, name=item.label) for item in alone}

    @classmethod
    def of(cls, reward: AnyReward | RewardSet) -> RewardSet:
        """Returns a RewardSet unchanged, and wraps a single reward into a set of one."""
        if isinstance(reward, RewardSet):
            return reward
        return cls([WeightedReward(label=reward_name(reward), weight=1.0, reward=reward)])

    @classmethod
    def from_config(cls, config: RolloutConfig, own: OwnRewards | None = None) -> RewardSet:
        """Builds the rewards that the config names, or a set of the rewards in `own` instead."""
        rewards = _named_rewards(config) if own is None else _own_rewards(config, own)
        limits = ScoringLimits(
            timeout_s=config.reward_timeout_s, concurrency=config.reward_concurrency, num_workers=config.reward_workers
        )
        value = None if config.reward_failure_value == "exclude" else float(config.reward_failure_value)
        made = cls(rewards, limits=limits, policy=FailurePolicy(max_failures=config.max_reward_failures, value=value))
        return made.judge_only(config.reward_for) if config.reward_for else made

    def judge_only(self, reward_for: Sequence[str]) -> RewardSet:
        """Has rewards judge only the records that reward.field=value names; returns the set."""
        self.conditions = conditions_of(reward_for, [item.label for item in self.rewards])
        for index, item in enumerate(self.rewards):
            if (condition := self.conditions.get(item.label)) is None:
                continue
            if is_collective(item.reward):
                together = SelectiveTogether(reward=item.reward, condition=condition)
                self.rewards[index] = replace(item, reward=together)
            else:
                self._runners[item.label] = SelectiveRunner(self._runners[item.label], condition)
        return self

    def prepare(self, strategy: Any) -> None:
        """Loads the rewards that are sharded over the ranks; every rank calls it."""
        for item in self.rewards:
            if is_collective(item.reward):
                item.reward.prepare(strategy)

    def run(self, label: str, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns the outcomes of one reward that is not collective."""
        return self._runners[label].run(samples, budget)

    async def arun(self, label: str, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Does what run() does without blocking the calling event loop, if the reward is async or isolated."""
        return await self._runners[label].arun(samples, budget)

    def hear(self, listener: Callable[[str, Sequence[Sample], Sequence[Outcome]], None]) -> None:
        """Calls a function with label, samples and outcomes whenever a reward has given outcomes from now on."""
        for index, item in enumerate(self.rewards):
            if is_collective(item.reward):
                self.rewards[index] = replace(item, reward=HeardTogether(item.reward, partial(listener, item.label)))
        self._runners = {label: HeardRunner(one, partial(listener, label)) for label, one in self._runners.items()}

    @property
    def collective_label(self) -> str | None:
        """The label of a reward that all ranks compute together, if there is one."""
        return next((item.label for item in self.rewards if is_collective(item.reward)), None)

    @property
    def compares_siblings(self) -> bool:
        """Whether any reward judges all samples of a prompt at once."""
        return any(runner.kind.scope == "group" for runner in self._runners.values())

    def combine(self, outcomes: Mapping[str, Sequence[Outcome]]) -> Scores:
        """Returns the weighted sums of the outcomes that run() returned for each label.

        Where a reward does not apply, it adds nothing; fail_unjudged() finds the samples to which none applies.
        """
        given = {name: [one for one in part if isinstance(one, float)] for name, part in outcomes.items()}
        weighted = [
            [one.weight * (got if isinstance(got, float) else self._instead_of(got)) for got in outcomes[one.label]]
            for one in self.rewards
        ]
        # Rounded once: 0.7 + 0.2 + 0.1, added one by one, is below 1, and a sample counts as right from 1 on.
        return Scores(rewards=[math.fsum(parts) for parts in zip(*weighted, strict=True)], components=given)

    def _instead_of(self, outcome: RewardError | None) -> float:
        if outcome is None:
            return 0.0
        return NO_REWARD if self.policy.value is None else self.policy.value

    def close(self) -> None:
        """Ends worker processes."""
        for runner in self._runners.values():
            runner.close()


class HeardRunner(RewardRunner):
    """A runner that reports the outcomes of another runner to a listener."""

    def __init__(self, runner: RewardRunner, listener: Callable[[Sequence[Sample], Sequence[Outcome]], None]) -> None:
        super().__init__(runner.reward, runner.kind, runner.limits, runner.name)
        self._runner, self._listener = runner, listener

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns the runner's outcomes after reporting them to the listener."""
        outcomes = self._runner.run(samples, budget)
        self._listener(samples, outcomes)
        return outcomes

    async def arun(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Does what run() does without blocking the calling event loop, if the runner can."""
        outcomes = await self._runner.arun(samples, budget)
        self._listener(samples, outcomes)
        return outcomes

    def close(self) -> None:
        """Ends the runner."""
        self._runner.close()


@dataclass(frozen=True, slots=True)
class HeardTogether:
    """A reward that all ranks compute together, and that reports its outcomes to a listener."""

    reward: Any
    listener: Callable[[Sequence[Sample], Sequence[Outcome]], None]
    is_collective = True

    def prepare(self, strategy: Any) -> None:
        """Loads the reward; every rank calls it."""
        self.reward.prepare(strategy)

    def __call__(self, samples: Sequence[Sample], /) -> list[Outcome]:
        outcomes: list[Outcome] = self.reward(samples)
        self.listener(samples, outcomes)
        return outcomes


def is_collective(reward: Any) -> bool:
    """Returns whether all ranks must compute the reward together, such as that of a model sharded over them."""
    return bool(getattr(reward, "is_collective", False))


def make_runner(reward: AnyReward, limits: ScoringLimits = _NO_LIMITS, *, name: str = "") -> RewardRunner:
    """Returns a reward that is ready to run; its signature is checked here, before anything expensive."""
    kind = kind_of(reward)
    plain = UnitRunner if kind.scope != "sample" else OwnRunner if kind.is_own else RewardRunner
    runner = IsolatedRunner if kind.isolation is not None else AsyncRunner if kind.is_async else plain
    return runner(reward, kind, limits, name or reward_name(reward))


def score(reward: AnyReward, samples: Sequence[Sample]) -> list[float]:
    """Returns the reward of each sample; raises RewardError with the reward, prompt and response that failed."""
    runner = make_runner(reward)
    budget = FailureBudget()
    try:
        outcomes = {runner.name: runner.run(samples, budget)}
    finally:
        runner.close()
    budget.record(fail_unjudged(samples, outcomes))
    return [outcome for outcome in outcomes[runner.name] if isinstance(outcome, float)]


# ---- Rewards by name -------------------------------------------------------------------------------------------------


def load_reward(name: str, parameters: Mapping[str, Any] | None = None) -> AnyReward:
    """Loads the reward of a built-in name, of "package.module:function", or of "path/to/file.py:function".

    A class is constructed with the parameters; they are bound to the keyword-only parameters of a function. Values that
    are texts are converted to the declared type.
    """
    reward = resolve_name(BUILTIN_REWARDS[name]) if name in BUILTIN_REWARDS else own_reward(name)
    if not callable(reward):
        raise _not_a_function(name, reward)
    given = _checked_parameters(name, reward, parameters or {})
    if inspect.isclass(reward):
        return cast(AnyReward, reward(**given))
    return cast(AnyReward, partial(reward, **given) if given else reward)


def own_reward(name: str) -> Any:
    """Loads a user's reward from a file or a module."""
    return load_object(name, builtin=BUILTIN_REWARDS, what="reward", example="my_reward")


def _not_a_function(name: str, reward: object) -> ValueError:
    return ValueError(
        f"The reward {name!r} is a {type(reward).__name__}: it must be a function from a Sample to a number."
    )


def _checked_parameters(name: str, reward: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(reward).parameters.values()
    known = {item.name: item for item in parameters if item.kind in _SETTABLE[inspect.isclass(reward)]}
    missing = [key for key, item in known.items() if item.default is inspect.Parameter.empty and key not in given]
    if missing or not given.keys() <= known.keys():
        raise _wrong_parameters(name, known, given, missing)
    return {key: _typed(name, known[key], value) for key, value in given.items()}


def _wrong_parameters(
    name: str, known: Mapping[str, Any], given: Mapping[str, Any], missing: Sequence[str]
) -> ValueError:
    for key in given:
        if key not in known:
            allowed = f"It has {', '.join(known)}." if known else "It has none."
            return ValueError(f"The reward {name!r} has no parameter {key!r}. {allowed}")
    return ValueError(
        f"The reward {name!r} needs a value for {', '.join(missing)}: give --reward_args "
        f"{_label(name)}.{missing[0]}=..."
    )


def _typed(name: str, parameter: inspect.Parameter, value: Any) -> Any:
    """Reads a text as YAML, unless the parameter is declared as str, so that a pattern needs no quoting."""
    declared = declared_type(parameter.annotation)
    if declared == "str" or not isinstance(value, str):
        return value
    typed = named_values([f"{parameter.name}={value}"], "reward_args")[parameter.name]
    if not fits(declared, typed):
        raise ValueError(f"The reward {name!r}: {parameter.name} is {value!r}, and it must be {declared}.")
    return typed


# ---- Rewards of a config ---------------------------------------------------------------------------------------------


def _own_rewards(config: RolloutConfig, own: OwnRewards) -> list[WeightedReward]:
    if config.reward_args:
        raise ValueError("--reward_args are given, but the reward is an object of your own: give it parameters.")
    if config.reward_for:
        raise ValueError(
            "--reward_for is given, but the reward is an object of your own: let it return None for the samples that "
            "it does not judge."
        )
    rewards = list(own) if isinstance(own, Sequence) and not isinstance(own, str) else [own]
    for name in rewards:
        if isinstance(name, str):
            raise ValueError(f"The reward {name!r} is a name, which belongs in the config: reward=({name!r},).")
    if not rewards:
        raise ValueError("The list of rewards is empty. Give one, such as exact_match.")
    return [WeightedReward(label=_label(reward_name(reward)), weight=1.0, reward=reward) for reward in rewards]


def _named_rewards(config: RolloutConfig) -> list[WeightedReward]:
    named = [_split_weight(text) if "=" in text else (text, 1.0) for text in config.reward]
    labels = [_label(name) for name, _ in named]
    _check_labels(labels)
    parameters = _parameters_by_label(config.reward_args, labels) if config.reward_args else {}
    has_options = config.judge != JudgeConfig() or config.reward_model or config.code.unsafe
    if has_options or {"judge", "reward_model"} & set(labels):
        _add_options(parameters, config, labels)
    return [
        WeightedReward(label=label, weight=weight, reward=load_reward(name, parameters.get(label)))
        for label, (name, weight) in zip(labels, named, strict=True)
    ]


def _add_options(parameters: dict[str, dict[str, Any]], config: RolloutConfig, labels: Sequence[str]) -> None:
    """Adds the parameters that are set by options of their own, such as --judge.url."""
    if "judge" in labels:
        parameters.setdefault("judge", {})["settings"] = config.judge
    elif config.judge != JudgeConfig():
        raise ValueError("--judge options are given, but judge is not among --reward.")
    if "reward_model" in labels:
        own = parameters.setdefault("reward_model", {})
        own |= {"path": config.reward_model, "trust_remote_code": config.trust_remote_code}
    elif config.reward_model:
        raise ValueError(f"--reward_model {config.reward_model} is given, but reward_model is not among --reward.")
    if config.code.unsafe and "code" not in labels:
        raise ValueError("--code.unsafe is given, but code is not among --reward.")
    if config.code.unsafe:
        parameters.setdefault("code", {})["unsafe"] = True


def labels_of(reward: Sequence[str]) -> list[str]:
    """Returns the names in metrics of the rewards that --reward gives."""
    return [_label(_split_weight(text)[0] if "=" in text else text) for text in reward]


def _split_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not name or not 0 < abs(value) <= 1e30:
        raise ValueError(f"--reward {text!r}: behind = there must be a weight, a number other than 0, at most 1e30.")
    return name, value


def _label(name: str) -> str:
    """Returns a reward's name in metrics: the last part of its path."""
    return name.rpartition(":")[2].rpartition(os.sep)[2]


def _check_labels(labels: Sequence[str]) -> None:
    if not labels or len(set(labels)) < len(labels) or set(labels) & set(_TAKEN):
        raise _wrong_labels(labels)


def _wrong_labels(labels: Sequence[str]) -> ValueError:
    if not labels:
        return ValueError("--reward names no reward. Give one, such as exact_match.")
    for index, label in enumerate(labels):
        if label in labels[:index]:
            return ValueError(f"--reward has two rewards named {label!r}, whose metrics would be one. Rename one.")
        if label in _TAKEN:
            break
    return ValueError(f"A reward cannot be named {label!r}: reward/{label} is another metric. Rename it.")


def _parameters_by_label(items: Sequence[str], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reads texts of the form reward.parameter=value, in which the reward is named by its label."""
    parameters: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for item in items:
        path, separator, value = item.partition("=")
        label, dot, key = path.partition(".")
        if not separator or not dot or not key.isidentifier():
            raise ValueError(
                f"--reward_args {item!r}: it must be reward.parameter=value, without spaces around the sign."
            )
        if label not in parameters:
            raise ValueError(f"--reward_args {item!r}: --reward has no {label!r}. {nearest_name(label, set(labels))}")
        if key in parameters[label]:
            raise ValueError(f"--reward_args: {label}.{key} is given twice.")
        parameters[label][key] = value
    return parameters
