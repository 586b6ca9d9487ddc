"""What a reward is, and how samples are scored by one. A reward that fails stops the run: it never counts as 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Protocol, TypeAlias, cast

from lightrl.records import Sample

_MAX_SHOWN = 200  # characters of a response in an error


class Reward(Protocol):
    """Judges one sample. It must depend on the sample alone: ranks score their own samples, in any order."""

    def __call__(self, sample: Sample, /) -> float: ...


class BatchReward(Protocol):
    """Judges many samples at once, a number for each in their order, as a reward model does best."""

    is_batched: bool  # True; @batch_reward sets it

    def __call__(self, samples: Sequence[Sample], /) -> Sequence[float]: ...


AnyReward: TypeAlias = Reward | BatchReward


class RewardError(RuntimeError):
    """A reward raised, or returned what is not a finite number."""


def batch_reward(function: Callable[[Sequence[Sample]], Sequence[float]]) -> BatchReward:
    """Marks a function from many samples to a number for each as a batch reward."""
    reward = cast(BatchReward, function)
    reward.is_batched = True
    return reward


def score(reward: AnyReward, samples: Sequence[Sample]) -> list[float]:
    """The reward of each sample. Raises RewardError naming the reward, the prompt and the response it failed on."""
    if getattr(reward, "is_batched", False):
        return _score_batch(cast(BatchReward, reward), samples)
    return [_score_one(cast(Reward, reward), sample) for sample in samples]


def _score_one(reward: Reward, sample: Sample) -> float:
    try:
        value = reward(sample)
    except Exception as error:
        raise RewardError(f"{_name(reward)} raised {_describe(error)} on {_place(sample)}.") from error
    return _require_finite(value, reward, sample)


def _score_batch(reward: BatchReward, samples: Sequence[Sample]) -> list[float]:
    if not samples:
        return []
    try:
        values = list(reward(samples))
    except Exception as error:
        raise RewardError(
            f"{_name(reward)} raised {_describe(error)} on {len(samples)} samples, first {_place(samples[0])}."
        ) from error
    if len(values) != len(samples):
        raise RewardError(f"{_name(reward)} returned {len(values)} numbers for {len(samples)} samples: one for each.")
    return [_require_finite(value, reward, sample) for value, sample in zip(values, samples, strict=True)]


def _require_finite(value: object, reward: AnyReward, sample: Sample) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(
            f"{_name(reward)} returned {_shorten(repr(value))} ({type(value).__name__}) on {_place(sample)}. "
            "A reward must return a finite int, float or bool."
        )
    return float(value)


def _name(reward: AnyReward) -> str:
    return f"The reward {getattr(reward, '__name__', type(reward).__name__)!r}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {_shorten(str(error)).rstrip('.')}"


def _place(sample: Sample) -> str:
    return f"prompt {sample.prompt.index}, sample {sample.sample_index}, response {_shorten(sample.text)!r}"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"
