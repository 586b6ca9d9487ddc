"""Runs a plain reward over samples. A call that fails gives an error for the sample, never a reward of 0.

A reward that returns None for a sample does not apply to it.

A reward is a function from one sample, the samples of a prompt, or many samples to numbers. It is plain, async or
isolated. Rewards of groups or batches (unit_scoring.py), async rewards (async_scoring.py) and isolated ones
(worker_pool.py) have runners of their own.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from lightrl.records import Sample
from lightrl.rewards.time_limit import call_in_time

Scope = Literal["sample", "group", "batch"]
_LIST_TYPES = ("list", "Sequence", "Iterable", "tuple", "List", "Collection")
_MAX_SHOWN = 200  # characters of a response in an error message
NO_REWARD = math.nan
"""Stands for a missing reward; any sum that contains it is NO_REWARD, too."""


# ---- Kinds of rewards ------------------------------------------------------------------------------------------------

Numbers: TypeAlias = Sequence[float | None]  # None: the reward does not apply to the sample


class Reward(Protocol):
    """A function that judges one sample and depends on nothing else: each rank scores its own samples, in any order.

    It returns None if it does not apply to the sample.
    """

    def __call__(self, sample: Sample, /) -> float | Awaitable[float | None] | None: ...


class GroupReward(Protocol):
    """A function that judges all samples of one prompt together and returns a number for each, in order."""

    is_grouped: bool  # True; @group_reward sets it

    def __call__(self, samples: Sequence[Sample], /) -> Numbers | Awaitable[Numbers]: ...


class BatchReward(Protocol):
    """A function that judges many samples at once, as suits a reward model, and returns a number for each, in order."""

    is_batched: bool  # True; @batch_reward sets it

    def __call__(self, samples: Sequence[Sample], /) -> Numbers | Awaitable[Numbers]: ...


AnyReward: TypeAlias = Reward | GroupReward | BatchReward
OwnRewards: TypeAlias = AnyReward | Sequence[AnyReward]  # several are summed
Many: TypeAlias = Callable[[Sequence[Sample]], Numbers | Awaitable[Numbers]]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class NoVerdictError(Exception):
    """Raised by a reward for a response that it can judge neither right nor wrong.

    The sample is treated as one whose reward failed, but it never stops a run.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The options of an isolated reward."""

    timeout_s: float | None = None  # of a sample, if it is shorter than --reward_timeout_s
    no_verdict_if_stopped: bool = False  # True: a response that hangs or crashes it has no verdict, not a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKind:
    """The way in which a reward must be called."""

    is_own: bool = True  # not built in: it has no tests of ours
    scope: Scope = "sample"
    is_async: bool = False
    isolation: Isolation | None = None
    max_concurrency: int | None = None  # calls of an async reward that may wait at the same time
    needs_time_limit: bool = True  # False: a call for one sample cannot hang, so no timer is set around it


def batch_reward(function: Many) -> BatchReward:
    """Marks a function as a batch reward: it takes many samples and returns a number for each."""
    reward = cast(BatchReward, function)
    reward.is_batched = True
    return reward


def group_reward(function: Many) -> GroupReward:
    """Marks a function as a group reward: it takes all samples of a prompt and returns a number for each."""
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
    """Returns how a reward must be called; raises ValueError if its signature does not allow that."""
    function = unwrapped(reward)
    is_batched, is_grouped = (bool(getattr(function, name, False)) for name in ("is_batched", "is_grouped"))
    kind = RewardKind(
        is_own=not str(getattr(function, "__module__", "")).startswith("lightrl.rewards."),
        scope="batch" if is_batched else "group" if is_grouped else "sample",
        is_async=any(map(inspect.iscoroutinefunction, (function, type(function).__call__))),
        isolation=getattr(function, "isolation", None),
        max_concurrency=getattr(function, "max_concurrency", None),
        needs_time_limit=getattr(function, "needs_time_limit", True),
    )
    if kind.is_own:
        _check_marks(reward, kind, is_grouped=is_grouped)
        _check_signature(reward, kind.scope)
    return kind


def _check_marks(reward: Any, kind: RewardKind, *, is_grouped: bool) -> None:
    if kind.scope == "batch" and is_grouped:
        raise _contradiction(reward, "is marked as a batch and as a group reward: choose one.")
    if kind.isolation is not None and (kind.scope != "sample" or kind.is_async):
        wanted = f"it must be a plain function of one sample, neither async nor a {kind.scope} reward."
        raise _contradiction(reward, f"is isolated: {wanted}")
    limit = kind.max_concurrency
    if kind.is_async and limit is not None and not (isinstance(limit, Integral) and limit >= 1):
        raise _contradiction(reward, f"has max_concurrency {limit!r}: it must be a whole number from 1 on, or None.")


def unwrapped(reward: Any) -> Any:
    """Returns the function that a partial call holds."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward


def _check_signature(reward: Any, scope: Scope) -> None:
    if isinstance(unwrapped(reward), type):
        raise _contradiction(reward, f"is a class: give an object of it, reward={reward_name(reward)}(...).")
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some callables written in C have no signature
        if not callable(reward):
            raise _contradiction(reward, "is an object that cannot be called: give its class a __call__.") from None
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


# ---- Calls -----------------------------------------------------------------------------------------------------------


_LARGEST = 1e30  # its square, which the deviation of a group needs, is far from infinity


class RewardError(RuntimeError):
    """A reward raised, hung, or returned a value that is not a finite number."""

    is_no_verdict = False  # the response could not be judged, which never stops a run
    key = (0, 0)  # (position, sample index) of the sample


Outcome: TypeAlias = float | RewardError | None  # None: the reward does not apply to the sample


def counted(outcome: Outcome, failure_value: float | None) -> float | None:
    """Returns the number that an outcome counts as: NO_REWARD for a failure that counts as none, None for no outcome.

    failure_value: The number that a failure counts as.
    """
    if not isinstance(outcome, RewardError):
        return outcome
    return NO_REWARD if failure_value is None else failure_value


def has_reward(value: float) -> bool:
    """Returns whether the value is a reward and not NO_REWARD."""
    return not math.isnan(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLimits:
    """The limits on the time and the processes of a reward."""

    timeout_s: float = 0.0  # for each sample; 0 sets no limit
    concurrency: int = 32  # calls of an async reward that may wait at the same time
    num_workers: int = 1  # processes of an isolated reward


@dataclass(eq=False)
class RewardRunner:
    """Calls a plain reward for one sample after another."""

    reward: Any
    kind: RewardKind
    limits: ScoringLimits
    name: str

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns an outcome for each sample; raises RewardError as soon as the budget is exceeded."""
        outcomes: list[Outcome] = []
        for sample in samples:
            outcomes.append(self._call_for(sample))
            if not isinstance(outcomes[-1], float):
                budget.record(outcomes[-1:])
        return outcomes

    async def arun(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Does what run() does, when called from an event loop; a plain reward blocks the loop."""
        return self.run(samples, budget)

    def close(self) -> None:
        """Frees what the runner keeps between calls."""

    def _call_for(self, sample: Sample) -> Outcome:
        try:
            value = self._call_in_time(sample) if self.kind.needs_time_limit else self.reward(sample)
        except (Exception, SystemExit) as error:  # code of a response that a reward runs may call exit()
            return failed(self.name, [sample], error)
        return score_outcome(self.name, sample, value)

    def _call_in_time(self, sample: Sample) -> Any:
        return call_in_time(self.limits.timeout_s, self.reward, sample)


# ---- Failures --------------------------------------------------------------------------------------------------------


@dataclass
class FailureBudget:
    """The number of failures that are tolerated in one scoring before it is given up."""

    max_failures: int = 0
    failures: list[RewardError] = field(default_factory=list)
    no_verdicts: list[RewardError] = field(default_factory=list)
    num_left_out: int = 0  # outcomes of rewards that do not apply to their samples
    most_unusual: int = 0  # largest number of outcomes on any rank that are no numbers; the same on all ranks

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Counts the outcomes that are no numbers; raises once there are more failures than allowed."""
        unusual = [item for item in outcomes if not isinstance(item, float)]
        if unusual:
            self._count(unusual)

    def _count(self, unusual: list[RewardError | None]) -> None:
        for item in unusual:
            if item is None:
                self.num_left_out += 1
            else:
                (self.no_verdicts if item.is_no_verdict else self.failures).append(item)
        if len(self.failures) > self.max_failures:
            raise self.exceeded(self.failures[0], len(self.failures))

    def exceeded(self, first: RewardError, count: int) -> RewardError:
        """Returns the error to raise; if no failure is allowed, it is the first failure itself."""
        if self.max_failures == 0:
            return first
        error = RewardError(
            f"{count} rewards have failed, more than --max_reward_failures {self.max_failures}. The first: {first}"
        )
        error.__cause__ = first.__cause__
        return error


def score_outcome(name: str, sample: Sample, value: Any) -> Outcome:
    """Returns the value that a reward returned, or an error if it is neither a finite number nor None."""
    if isinstance(value, int | float | Real) and -_LARGEST <= value <= _LARGEST:  # type: ignore[operator]  # neither NaN nor infinity is
        return float(value)
    return _unusual_outcome(name, sample, value)


def _unusual_outcome(name: str, sample: Sample, value: object) -> Outcome:
    if value is None:
        return None
    return float(cast(Any, value)) if is_numpys_bool(value) else not_a_number(name, sample, value)


def is_numpys_bool(value: object) -> bool:
    """Returns whether it is a boolean of numpy, which is no number to Python."""
    numpy = sys.modules.get("numpy")  # not imported here, because processes of isolated rewards start without it
    return numpy is not None and isinstance(value, numpy.bool_)


def failed(name: str, samples: Sequence[Sample], error: BaseException) -> RewardError:
    """Returns the error for a call that raised."""
    where = describe_sample(samples[0])
    if len(samples) > 1:
        where = f"{len(samples)} samples, first {where}"
    reason = _shown(str, error).rstrip(".")
    is_no_verdict = isinstance(error, NoVerdictError)
    verb = f"gave no verdict ({reason})" if is_no_verdict else f"raised {type(error).__name__}: {reason}"
    result = _error(f"The reward {name!r} {verb} on {where}.{_what_there_is(error, samples[0])}", samples[0])
    result.is_no_verdict = is_no_verdict
    result.__cause__ = error
    return result


def _what_there_is(error: BaseException, sample: Sample) -> str:
    """Returns a hint at what a reward can read, if it looked for something that does not exist."""
    if isinstance(error, KeyError):
        fields = ", ".join(map(repr, sample.prompt.fields)) or "none"
        return f" Fields of the record beside prompt and answer, in sample.prompt.fields: {fields}."
    if isinstance(error, AttributeError | TypeError) and str(error).startswith(("'Sample' object", "'Prompt' object")):
        return (
            " A reward reads sample.text, sample.prompt.answer, and the record's other fields in sample.prompt.fields."
        )
    return ""


def not_a_number(name: str, sample: Sample, value: object) -> RewardError:
    """Returns the error for a value that is not a finite number."""
    return _error(
        f"The reward {name!r} returned {_shown(repr, value)} ({type(value).__name__}) on "
        f"{describe_sample(sample)}. A reward must return a finite int, float or bool of at most {_LARGEST:g}, or None "
        "if it does not apply to the sample.",
        sample,
    )


def wrong_count(name: str, samples: Sequence[Sample], count: int) -> RewardError:
    """Returns the error for a call that returned more or fewer numbers than there were samples."""
    return _error(
        f"The reward {name!r} returned {count} numbers for {len(samples)} samples: one for each.",
        samples[0],
    )


def no_list(name: str, samples: Sequence[Sample], value: object) -> RewardError:
    """Returns the error for a call that returned no list for several samples, such as one without a return."""
    return _error(
        f"The reward {name!r} returned {_shown(repr, value)} for {len(samples)} samples. A group or batch reward must "
        "return a list with a number, or None, for each.",
        samples[0],
    )


def not_judged(reasons: Mapping[str, str], sample: Sample) -> RewardError:
    """Returns the error for a sample to which no reward applies; reasons: why not, by reward, empty for a None."""
    where = describe_sample(sample)
    if list(reasons.values()) == [""]:
        return _error(
            f"The reward {next(iter(reasons))!r} returned None on {where}. None says that a reward does not apply to "
            "the sample, and there is no other reward. If it should apply, does the function lack a return?",
            sample,
        )
    told = ", ".join(f"{name!r} {reason or 'returned None'}" for name, reason in reasons.items())
    return _error(
        f"No reward applies to {where}: {told}. Give a reward that judges such records, or leave them out of the data.",
        sample,
    )


def _error(message: str, sample: Sample) -> RewardError:
    error = RewardError(message)
    error.key = (sample.position, sample.sample_index)
    return error


def describe_sample(sample: Sample) -> str:
    """Names a sample in a message."""
    prompt = f"{sample.prompt.index} {shorten(sample.prompt.text)!r}"
    return f"prompt {prompt}, sample {sample.sample_index}, response {shorten(sample.text)!r}"


def shorten(text: str) -> str:
    """Shortens a long text and states its length."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _shown(text_of: Callable[[Any], str], value: object) -> str:
    """Returns the text of what a user's code returned or raised, which may be unable to give one."""
    try:
        return shorten(text_of(value))
    except Exception as error:
        return f"something whose {text_of.__name__}() raises {type(error).__name__}"


def with_traceback(error: RewardError) -> str:
    """Returns the error and the traceback of its cause as text."""
    if error.__cause__ is None:
        return str(error)
    return f"{error}\n{''.join(traceback.format_exception(error.__cause__)).rstrip()}"
