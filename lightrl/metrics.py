"""The numbers of a step: statistics that are reduced over the ranks, seconds per phase, and memory."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

_GB = 1e9
_KINDS: dict[str, tuple[Callable[[float, float], float], float]] = {  # how two values combine, and the initial value
    "mean": (operator.add, 0.0),
    "sum": (operator.add, 0.0),
    "max": (np.maximum, float("-inf")),  # NaN if one of the two is NaN, which max() may lose
    "min": (np.minimum, float("inf")),
}


class Reducer(Protocol):
    """The collective that a reduction over ranks needs."""

    def all_gather_object(
        self, item: dict[str, tuple[str, float, float]]
    ) -> list[dict[str, tuple[str, float, float]]]: ...


class Statistics:
    """Named statistics of one step on one rank. A name may exist on some ranks only."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, float, float]] = {}  # name: (kind, numerator or extremum, denominator)

    def mean(self, name: str, total: float, count: float) -> None:
        """Adds to a weighted mean: totals and counts are summed over calls and ranks before they are divided."""
        self._join(name, "mean", total, count)

    def values(self, name: str, values: Sequence[float]) -> None:
        """Adds values to a mean, each with a weight of 1."""
        self.mean(name, sum(values), len(values))

    def add(self, name: str, value: float) -> None:
        """Adds to a sum over calls and ranks."""
        self._join(name, "sum", value)

    def maximum(self, name: str, value: float) -> None:
        """Keeps the maximum over calls and ranks; a number that is equal on all ranks stays as it is."""
        self._join(name, "max", value)

    def minimum(self, name: str, value: float) -> None:
        """Keeps the minimum over calls and ranks."""
        self._join(name, "min", value)

    def _join(self, name: str, kind: str, value: float, count: float = 0.0) -> None:
        join, start = _KINDS[kind]
        known, before, counted = self._values.get(name, (kind, start, 0.0))
        if known != kind:
            raise ValueError(f"The metric {name} is a {known} already and no {kind}: give one of them another name.")
        self._values[name] = (kind, float(join(before, float(value))), counted + float(count))

    def take(self) -> dict[str, tuple[str, float, float]]:
        """Returns what was added so far, for merge() in another process, and starts over."""
        values, self._values = self._values, {}
        return values

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the statistics when the body ends, so that whatever it added is forgotten."""
        before = dict(self._values)
        try:
            yield
        finally:
            self._values = before

    def merge(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Adds the statistics that take() returned in another process."""
        for name, (kind, value, count) in values.items():
            self._join(name, kind, value, count)

    def reduce(self, comm: Reducer) -> dict[str, float]:
        """Returns the step's numbers over all ranks, sorted by name, and starts over."""
        total = Statistics()
        for values in comm.all_gather_object(self.take()):
            total.merge(values)
        return {name: _reduced(*value) for name, value in sorted(total.take().items())}


def _reduced(kind: str, value: float, count: float) -> float:
    if kind != "mean":
        return value
    return value / count if count else 0.0


@dataclass
class Stopwatch:
    """Adds up the seconds of each phase of a step; each measured body is also a span for the profiler."""

    span: Callable[[str], AbstractContextManager[Any]] = nullcontext
    seconds: dict[str, float] = field(default_factory=dict, init=False)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the seconds of the body, including work on the device, to a phase; a body that raises adds nothing."""
        started = time.perf_counter()
        with self.span(name):
            yield
        if torch.cuda.is_initialized():  # a run on CPUs must not take memory of a GPU for a wait
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> Mapping[str, float]:
        """Returns the seconds per phase and starts over."""
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

    unit = 1 if os.uname().sysname == "Darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
