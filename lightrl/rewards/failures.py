"""What a reward that fails leaves behind: an error in the sample's place, counted against a budget."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from numbers import Real
from typing import TypeAlias

from lightrl.records import Sample
from lightrl.rewards.kinds import NoVerdictError

_MAX_SHOWN = 200  # characters of a response in an error
NO_REWARD = math.nan
"""Stands for the reward of a sample that has none; a sum with it stays without."""


class RewardError(RuntimeError):
    """A reward raised, hung, or returned what is not a finite number."""

    is_no_verdict = False  # the response could not be judged, which never stops a run
    place = (0, 0)  # (position, sample index) of the sample


Outcome: TypeAlias = float | RewardError


def has_reward(value: float) -> bool:
    """Whether it is a number, and not NO_REWARD."""
    return not math.isnan(value)


def failed(name: str, samples: Sequence[Sample], error: Exception) -> RewardError:
    """That a call of the reward raised."""
    where = describe_sample(samples[0])
    if len(samples) > 1:
        where = f"{len(samples)} samples, first {where}"
    reason = shorten(str(error)).rstrip(".")
    is_no_verdict = isinstance(error, NoVerdictError)
    verb = f"gave no verdict ({reason})" if is_no_verdict else f"raised {type(error).__name__}: {reason}"
    found = _error(f"The reward {name!r} {verb} on {where}.", samples[0])
    found.is_no_verdict = is_no_verdict
    found.__cause__ = error
    return found


def not_a_number(name: str, sample: Sample, value: object) -> RewardError:
    """That it returned what is no finite number."""
    return _error(
        f"The reward {name!r} returned {shorten(repr(value))} ({type(value).__name__}) on "
        f"{describe_sample(sample)}. A reward must return a finite int, float or bool.",
        sample,
    )


def score_outcome(name: str, sample: Sample, value: object) -> Outcome:
    """The number that a reward returned, or the error that it is none."""
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    return not_a_number(name, sample, value)


def wrong_count(name: str, samples: Sequence[Sample], count: int) -> RewardError:
    """That it returned more or fewer numbers than there were samples."""
    return _error(
        f"The reward {name!r} returned {count} numbers for {len(samples)} samples: one for each.",
        samples[0],
    )


def _error(message: str, sample: Sample) -> RewardError:
    error = RewardError(message)
    error.place = (sample.position, sample.sample_index)
    return error


def describe_sample(sample: Sample) -> str:
    """Which sample it is, for a message."""
    return f"prompt {sample.prompt.index}, sample {sample.sample_index}, response {shorten(sample.text)!r}"


def shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def with_traceback(error: RewardError) -> str:
    """The error and the traceback of what caused it."""
    if error.__cause__ is None:
        return str(error)
    return f"{error}\n{''.join(traceback.format_exception(error.__cause__)).rstrip()}"


class FailureBudget:
    """How many failures a scoring may have before it is given up."""

    def __init__(self, max_failures: int = 0) -> None:
        self.max_failures = max_failures
        self.failures: list[RewardError] = []
        self.no_verdicts: list[RewardError] = []

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Counts the errors among the outcomes, each of which may be met again."""
        for item in outcomes:
            if not isinstance(item, RewardError):
                continue
            (self.no_verdicts if item.is_no_verdict else self.failures).append(item)
        if len(self.failures) > self.max_failures:
            raise self.exceeded(self.failures[0], len(self.failures))

    def exceeded(self, first: RewardError, count: int) -> RewardError:
        """What to raise: the failure itself where none is allowed."""
        if self.max_failures == 0:
            return first
        error = RewardError(
            f"{count} rewards have failed, more than --max_reward_failures {self.max_failures}. The first: {first}"
        )
        error.__cause__ = first.__cause__
        return error
