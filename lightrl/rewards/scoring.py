"""Runs a plain reward over samples. A call that fails becomes an error in the sample's place, never a reward of 0.

Rewards that are async (async_scoring.py) or isolated (worker_pool.py) have runners of their own.
"""

from __future__ import annotations

import math
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from numbers import Real
from types import FrameType
from typing import Any, TypeAlias

from lightrl.records import Sample
from lightrl.rewards.kinds import NoVerdictError, RewardKind

_MAX_SHOWN = 200  # characters of a response in an error
_REPEAT_S = 1.0  # code that swallows the alarm by a bare `except:` gets the next one
NO_REWARD = math.nan
"""The reward of a sample that has none; a sum with it is NO_REWARD too."""


class RewardError(RuntimeError):
    """A reward raised, hung, or returned a value that is not a finite number."""

    is_no_verdict = False  # the response could not be judged, which never stops a run
    key = (0, 0)  # (position, sample index) of the sample


Outcome: TypeAlias = float | RewardError


def has_reward(value: float) -> bool:
    """Returns whether the value is a number, and not NO_REWARD."""
    return not math.isnan(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLimits:
    """The time and the processes that a reward may take."""

    timeout_s: float = 0.0  # for each sample; 0 sets no limit
    concurrency: int = 32  # calls of an async reward that wait at the same time
    num_workers: int = 1  # processes of an isolated reward


class RewardRunner:
    """Calls a plain reward: for each sample, for each group, or once for all samples."""

    def __init__(self, reward: Any, kind: RewardKind, limits: ScoringLimits, name: str) -> None:
        self.reward = reward
        self.kind = kind
        self.limits = limits
        self.name = name

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns an outcome for each sample; raises RewardError as soon as the budget is exceeded."""
        outcomes: list[Outcome] = []
        for unit in self.units(samples):
            part = self._call(unit, budget)
            budget.record(part)
            outcomes += part
        return outcomes

    def close(self) -> None:
        """Frees what the runner keeps between calls."""

    def units(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Returns the samples of each call."""
        if self.kind.scope == "sample":
            return [[sample] for sample in samples]
        if self.kind.scope == "group":
            return [list(group) for _, group in groupby(samples, key=lambda sample: sample.position)]
        return [list(samples)] if samples else []

    def _call(self, unit: list[Sample], budget: FailureBudget) -> list[Outcome]:
        is_single = self.kind.scope == "sample"
        try:
            with time_limit(self.limits.timeout_s * len(unit)):
                returned = self.reward(unit[0] if is_single else unit)
                values = [returned] if is_single else list(returned)
        except Exception as error:
            if self.goes_on_singly(unit, budget):
                return [outcome for sample in unit for outcome in self._call([sample], budget)]
            return [failed(self.name, unit, error)] * len(unit)
        return self.checked(unit, values)

    def goes_on_singly(self, unit: list[Sample], budget: FailureBudget) -> bool:
        """Returns whether a batch that failed is called again sample by sample.

        Where failures are allowed, a bad sample then costs only itself, however the ranks have split the batch.
        """
        return self.kind.scope == "batch" and len(unit) > 1 and budget.max_failures > 0

    def checked(self, unit: list[Sample], values: list[Any]) -> list[Outcome]:
        """Returns the numbers of one call, with an error in place of each value that is no finite number."""
        if len(values) != len(unit):
            return [wrong_count(self.name, unit, len(values))] * len(unit)
        return [score_outcome(self.name, sample, value) for sample, value in zip(unit, values, strict=True)]


# ---- Failures --------------------------------------------------------------------------------------------------------


class FailureBudget:
    """The number of failures that a scoring may have before it is given up."""

    def __init__(self, max_failures: int = 0) -> None:
        self.max_failures = max_failures
        self.failures: list[RewardError] = []
        self.no_verdicts: list[RewardError] = []

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Counts the errors among the outcomes; raises once there are more failures than allowed."""
        errors = [item for item in outcomes if isinstance(item, RewardError)]
        if errors:
            self._count(errors)

    def _count(self, errors: list[RewardError]) -> None:
        for error in errors:
            (self.no_verdicts if error.is_no_verdict else self.failures).append(error)
        if len(self.failures) > self.max_failures:
            raise self.exceeded(self.failures[0], len(self.failures))

    def exceeded(self, first: RewardError, count: int) -> RewardError:
        """Returns the error to raise: the failure itself where none is allowed."""
        if self.max_failures == 0:
            return first
        error = RewardError(
            f"{count} rewards have failed, more than --max_reward_failures {self.max_failures}. The first: {first}"
        )
        error.__cause__ = first.__cause__
        return error


def score_outcome(name: str, sample: Sample, value: object) -> Outcome:
    """Returns the number that a reward returned, or an error if it is no finite number."""
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    return not_a_number(name, sample, value)


def failed(name: str, samples: Sequence[Sample], error: Exception) -> RewardError:
    """Returns the error of a call that raised."""
    where = describe_sample(samples[0])
    if len(samples) > 1:
        where = f"{len(samples)} samples, first {where}"
    reason = shorten(str(error)).rstrip(".")
    is_no_verdict = isinstance(error, NoVerdictError)
    verb = f"gave no verdict ({reason})" if is_no_verdict else f"raised {type(error).__name__}: {reason}"
    result = _error(f"The reward {name!r} {verb} on {where}.", samples[0])
    result.is_no_verdict = is_no_verdict
    result.__cause__ = error
    return result


def not_a_number(name: str, sample: Sample, value: object) -> RewardError:
    """Returns the error of a value that is no finite number."""
    return _error(
        f"The reward {name!r} returned {shorten(repr(value))} ({type(value).__name__}) on "
        f"{describe_sample(sample)}. A reward must return a finite int, float or bool.",
        sample,
    )


def wrong_count(name: str, samples: Sequence[Sample], count: int) -> RewardError:
    """Returns the error of a call that returned more or fewer numbers than there were samples."""
    return _error(
        f"The reward {name!r} returned {count} numbers for {len(samples)} samples: one for each.",
        samples[0],
    )


def _error(message: str, sample: Sample) -> RewardError:
    error = RewardError(message)
    error.key = (sample.position, sample.sample_index)
    return error


def describe_sample(sample: Sample) -> str:
    """Names a sample in a message."""
    return f"prompt {sample.prompt.index}, sample {sample.sample_index}, response {shorten(sample.text)!r}"


def shorten(text: str) -> str:
    """Cuts a long text and gives its length."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def with_traceback(error: RewardError) -> str:
    """Returns the error and the traceback of its cause as text."""
    if error.__cause__ is None:
        return str(error)
    return f"{error}\n{''.join(traceback.format_exception(error.__cause__)).rstrip()}"


# ---- Time limit ------------------------------------------------------------------------------------------------------


class TimeLimitError(Exception):
    """The body of time_limit() was still running at its end; the cause shows where."""


class _AlarmError(BaseException):
    """The alarm. It is not an Exception, so that `except Exception` in the body does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitError in the body after so many seconds; 0 sets no limit.

    It uses a signal. So it works in the main thread only (elsewhere there is no limit) and between Python instructions:
    it cannot end a single call into C that never returns. A timer that was already running is restored.
    """
    if seconds <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_armed = True

    def ring(_number: int, _frame: FrameType | None) -> None:
        if is_armed:
            raise _AlarmError

    started = time.monotonic()
    previous_handler = signal.signal(signal.SIGALRM, ring)
    outer_s, outer_repeat_s = signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S)
    try:
        yield
        is_armed = False
    except _AlarmError as alarm:
        is_armed = False
        raise TimeLimitError(f"no result after {seconds:g} s") from alarm
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        if outer_s:
            left_s = max(outer_s - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left_s, outer_repeat_s)
