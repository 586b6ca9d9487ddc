"""Kinds of rewards: functions from one sample, a prompt's samples, or many, to numbers; plain, async or isolated."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from lightrl.records import Sample

Scope = Literal["sample", "group", "batch"]
_LIST_TYPES = ("list", "Sequence", "Iterable", "tuple", "List", "Collection")


class Reward(Protocol):
    """A function that judges one sample and depends on it alone: ranks score their own samples, in any order."""

    def __call__(self, sample: Sample, /) -> float | Awaitable[float]: ...


class GroupReward(Protocol):
    """A function that judges all samples of one prompt together, a number for each in their order."""

    is_grouped: bool  # True; @group_reward sets it

    def __call__(self, samples: Sequence[Sample], /) -> Sequence[float] | Awaitable[Sequence[float]]: ...


class BatchReward(Protocol):
    """A function that judges many samples at once, a number for each in their order, as a reward model does best."""

    is_batched: bool  # True; @batch_reward sets it

    def __call__(self, samples: Sequence[Sample], /) -> Sequence[float] | Awaitable[Sequence[float]]: ...


AnyReward: TypeAlias = Reward | GroupReward | BatchReward
Many: TypeAlias = Callable[[Sequence[Sample]], Sequence[float] | Awaitable[Sequence[float]]]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class NoVerdictError(Exception):
    """A reward raises this about a response that it can judge neither right nor wrong.

    The sample counts as one whose reward failed, but it never stops a run.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The options of an isolated reward."""

    timeout_s: float | None = None  # of a sample, where it is shorter than --reward_timeout_s
    no_verdict_if_stopped: bool = False  # a response that hangs or crashes it has no verdict: that is no failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKind:
    """The way in which a reward must be called."""

    scope: Scope = "sample"
    is_async: bool = False
    isolation: Isolation | None = None
    max_concurrency: int | None = None  # calls of an async one that may wait at the same time


def batch_reward(function: Many) -> BatchReward:
    """Marks a function from many samples to a number for each as a batch reward."""
    reward = cast(BatchReward, function)
    reward.is_batched = True
    return reward


def group_reward(function: Many) -> GroupReward:
    """Marks a function from all samples of a prompt to a number for each as a group reward."""
    reward = cast(GroupReward, function)
    reward.is_grouped = True
    return reward


def isolated_reward(
    *, timeout_s: float | None = None, no_verdict_if_stopped: bool = False
) -> Callable[[FunctionT], FunctionT]:
    """Marks a function of one sample to run in a process of its own, which is killed when it takes too long."""

    def mark(function: FunctionT) -> FunctionT:
        isolation = Isolation(timeout_s=timeout_s, no_verdict_if_stopped=no_verdict_if_stopped)
        function.isolation = isolation  # type: ignore[attr-defined]
        return function

    return mark


def reward_name(reward: Any) -> str:
    """Returns the name of a reward in messages and metrics."""
    function = unwrapped(reward)
    return str(getattr(function, "__name__", type(function).__name__))


def kind_of(reward: AnyReward) -> RewardKind:
    """Returns how a reward must be called; raises ValueError if it cannot be called so."""
    function = unwrapped(reward)
    is_batched, is_grouped = (bool(getattr(function, name, False)) for name in ("is_batched", "is_grouped"))
    kind = RewardKind(
        scope="batch" if is_batched else "group" if is_grouped else "sample",
        is_async=any(map(inspect.iscoroutinefunction, (function, type(function).__call__))),
        isolation=getattr(function, "isolation", None),
        max_concurrency=getattr(function, "max_concurrency", None),
    )
    if is_batched and is_grouped:
        raise _contradiction(reward, "is marked as a batch and as a group reward: choose one.")
    if kind.isolation is not None and (kind.scope != "sample" or kind.is_async):
        wanted = f"it must be a plain function of one sample, neither async nor a {kind.scope} reward."
        raise _contradiction(reward, f"is isolated: {wanted}")
    _check_signature(reward, kind.scope)
    return kind


def unwrapped(reward: Any) -> Any:
    """Returns the function that a partial call holds."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward


def _check_signature(reward: Any, scope: Scope) -> None:
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some callables of C have none
        return
    try:
        bound = signature.bind(None)
    except TypeError as error:
        raise _wrong_signature(reward, scope, signature, error) from error
    first = signature.parameters[next(iter(bound.arguments))]
    if first.annotation is not inspect.Parameter.empty:
        _check_annotation(reward, scope, first.annotation)


def _check_annotation(reward: Any, scope: Scope, annotation: Any) -> None:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    takes_list = text.rpartition("typing.")[2].split("[")[0].rpartition(".")[2] in _LIST_TYPES
    if scope == "sample" and takes_list:
        raise _takes_a_list(reward, text)
    if scope != "sample" and text.rpartition(".")[2] == "Sample":
        raise _contradiction(reward, f"takes one Sample, but @{scope}_reward has it called with a list.")


def _contradiction(reward: Any, reason: str) -> ValueError:
    return ValueError(f"The reward {reward_name(reward)!r} {reason}")


def _takes_a_list(reward: Any, text: str) -> ValueError:
    return _contradiction(
        reward,
        f"takes {text}, and it is called with one Sample. Mark it with @group_reward to get all samples of a prompt, "
        "or with @batch_reward to get all there are.",
    )


def _wrong_signature(reward: Any, scope: Scope, signature: inspect.Signature, error: TypeError) -> ValueError:
    wanted = "a Sample" if scope == "sample" else "a list of Samples"
    return _contradiction(
        reward,
        f"has the parameters {signature}: it is called with one argument, {wanted} ({error}). The prompt's answer and "
        "other fields are in sample.prompt; further parameters must be keyword-only.",
    )
