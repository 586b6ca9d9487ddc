"""The numbers of a step: sums with counts until they are reduced over ranks, seconds, memory; and which are bad."""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

_GB = 1e9
_KINDS: dict[str, tuple[Callable[[float, float], float], float]] = {  # how two of them join, and what they begin from
    "mean": (operator.add, 0.0),
    "sum": (operator.add, 0.0),
    "max": (max, float("-inf")),
    "min": (min, float("inf")),
}


class Reducer(Protocol):
    """The collective that a reduction over ranks needs."""

    def all_gather_object(
        self, item: dict[str, tuple[str, float, float]]
    ) -> list[dict[str, tuple[str, float, float]]]: ...


class Statistics:
    """Named statistics of one step on one rank. A name may be known to some ranks only."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, float, float]] = {}  # name: (kind, numerator or extremum, denominator)

    def mean(self, name: str, total: float, count: float) -> None:
        """Adds to a weighted mean: totals and counts are summed over calls and ranks before they are divided."""
        self._join(name, "mean", total, count)

    def values(self, name: str, values: Sequence[float]) -> None:
        """Adds values to a mean one by one."""
        self.mean(name, sum(values), len(values))

    def add(self, name: str, value: float) -> None:
        """Adds to a sum over calls and ranks."""
        self._join(name, "sum", value)

    def maximum(self, name: str, value: float) -> None:
        """Keeps the maximum over calls and ranks, which for a number that all ranks share is that number."""
        self._join(name, "max", value)

    def minimum(self, name: str, value: float) -> None:
        """Keeps the minimum over calls and ranks."""
        self._join(name, "min", value)

    def _join(self, name: str, kind: str, value: float, count: float = 0.0) -> None:
        join, start = _KINDS[kind]
        known, before, counted = self._values.get(name, (kind, start, 0.0))
        if known != kind:
            raise ValueError(f"The metric {name} is a {known} already and no {kind}: give one of them another name.")
        self._values[name] = (kind, join(before, float(value)), counted + float(count))

    def take(self) -> dict[str, tuple[str, float, float]]:
        """Returns what was added, for merge() in another process, and starts anew."""
        values, self._values = self._values, {}
        return values

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Forgets what the body adds."""
        before = dict(self._values)
        try:
            yield
        finally:
            self._values = before

    def merge(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Adds what another process took."""
        for name, (kind, value, count) in values.items():
            self._join(name, kind, value, count)

    def reduce(self, comm: Reducer) -> dict[str, float]:
        """Returns the step's numbers over all ranks, sorted by name, and starts anew."""
        total = Statistics()
        for values in comm.all_gather_object(self.take()):
            total.merge(values)
        return {name: _number(*value) for name, value in sorted(total.take().items())}


def _number(kind: str, value: float, count: float) -> float:
    if kind != "mean":
        return value
    return value / count if count else 0.0


class Stopwatch:
    """Adds up the seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the seconds of the body, the device's work included, to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> Mapping[str, float]:
        """Returns the seconds per phase and starts anew."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def memory_in_use() -> dict[str, float]:
    """Returns this process's resident memory, and what torch has allocated and reserved on its GPU, in GB."""
    used = {"memory/host_gb": _resident_bytes() / _GB}
    if torch.cuda.is_available():
        used["memory/device_gb"] = torch.cuda.memory_allocated() / _GB
        used["memory/device_reserved_gb"] = torch.cuda.memory_reserved() / _GB
    return used


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else _peak_bytes()


def _peak_bytes() -> int:
    import resource  # noqa: PLC0415  (only where /proc is missing; absent on Windows)

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- What is bad about them ------------------------------------------------------------------------------------------

_FINITE = ("loss", "grad_norm", "kl", "entropy", "reward/mean", "ratio/mean", "mismatch/mean_abs", "critic/loss")
_SKIPPED = ("skipped_updates", "critic/skipped_updates")


class Limit(NamedTuple):
    """A bound on a metric, by the option that sets it."""

    metric: str
    option: str  # of --health.*
    is_bad: Callable[[float, Any], bool]  # of the metric
    text: str
    remedy: str


LIMITS = (
    Limit(
        "entropy",
        "min_entropy",
        lambda value, limits: value < limits.min_entropy,
        "the entropy of the policy has collapsed to {value:.3g}",
        "Raise --algorithm.entropy_coef or set --algorithm.entropy_target, lower --lr, or add --algorithm.kl_coef.",
    ),
    Limit(
        "reward/equal_groups",
        "max_equal_groups",
        lambda value, limits: value > limits.max_equal_groups,
        "{value:.1%} of the prompts got the same reward for all samples, which teach nothing",
        "Use prompts neither too easy nor too hard, a larger --group_size, or --dynamic_sampling.enabled True.",
    ),
    Limit(
        "mismatch/mean_abs",
        "max_mismatch",
        lambda value, limits: value > limits.max_mismatch,
        "the logprobs of the engine differ from the trainer's by {value:.3g} on the mean",
        "Compare the dtypes of engine and trainer, look at sync/canary_max_abs, and correct with "
        "--algorithm.correction tis.",
    ),
    Limit(
        "tokens/truncated",
        "max_truncated",
        lambda value, limits: value > limits.max_truncated,
        "{value:.1%} of the responses were cut off",
        "Raise --max_new_tokens, or check that the model's end token is the one that the chat template uses.",
    ),
    Limit(
        "episode/failed_share",
        "max_failed_episodes",
        lambda value, limits: value > limits.max_failed_episodes,
        "{value:.1%} of the episodes failed, and reward/mean is that of the others",
        "Read the first failure, which is logged above. An episode that should count as a bad one must end with a low "
        "reward in place of an error.",
    ),
    Limit(
        "tokens/response_mean",
        "min_response_tokens",
        lambda value, limits: value <= limits.min_response_tokens,
        "the responses have {value:.3g} tokens on the mean: they are empty",
        "Check the chat template and the reward, which may prefer an empty response, or lower --lr.",
    ),
)


def findings(metrics: Mapping[str, float], limits: Any) -> dict[str, str]:
    """Returns what is bad about a step, by metric: a sentence with the number and a remedy.

    limits: the options --health.*; those of a run that samples no responses have no limit of LIMITS.
    """
    found = {name: _not_finite(name) for name in _FINITE if not math.isfinite(metrics.get(name, 0.0))}
    found |= {name: _skipped(metrics[name]) for name in _SKIPPED if metrics.get(name, 0.0) > 0}
    present = [limit for limit in LIMITS if limit.metric in metrics and hasattr(limits, limit.option)]
    reached = [limit for limit in present if limit.is_bad(metrics[limit.metric], limits)]
    found |= {limit.metric: _beyond(limit, metrics[limit.metric], limits) for limit in reached}
    if metrics.get("reward/failures", 0.0) > 0 and "reward/mean" not in metrics:
        found["reward/failures"] = _without_reward(metrics["reward/failures"])
    return found


def _beyond(limit: Limit, value: float, limits: Any) -> str:
    told = limit.text.format(value=value)
    return f"{told} (--health.{limit.option} {getattr(limits, limit.option):g}). {limit.remedy}"


def _not_finite(name: str) -> str:
    return f"{name} is not finite. Look at the samples of the step and at the functions of your own that it comes from."


def _skipped(share: float) -> str:
    return (
        f"{share:.1%} of the updates were skipped on all ranks, for the reason logged above. If it goes on, lower --lr "
        "or --optim.max_norm, or look at the loss and the reward for a division by 0."
    )


def _without_reward(failures: float) -> str:
    return f"no sample has a reward: {failures:.0f} rewards failed. Look at the first failures, which are logged above."
