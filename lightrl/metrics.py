"""The numbers of a step: sums with their counts until they are reduced over ranks, seconds per phase, memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

_GB = 1e9


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
        numerator, denominator = self._before(name, "mean", 0.0)
        self._values[name] = ("mean", numerator + float(total), denominator + float(count))

    def values(self, name: str, values: Sequence[float]) -> None:
        """Adds values to a mean one by one."""
        self.mean(name, sum(values), len(values))

    def add(self, name: str, value: float) -> None:
        """Adds to a sum over calls and ranks."""
        before, _ = self._before(name, "sum", 0.0)
        self._values[name] = ("sum", before + float(value), 0.0)

    def maximum(self, name: str, value: float) -> None:
        """Keeps the maximum over calls and ranks, which for a number that all ranks share is that number."""
        before, _ = self._before(name, "max", float("-inf"))
        self._values[name] = ("max", max(before, float(value)), 0.0)

    def minimum(self, name: str, value: float) -> None:
        """Keeps the minimum over calls and ranks."""
        before, _ = self._before(name, "min", float("inf"))
        self._values[name] = ("min", min(before, float(value)), 0.0)

    def _before(self, name: str, kind: str, start: float) -> tuple[float, float]:
        known, *numbers = self._values.get(name, (kind, start, 0.0))
        if known != kind:
            raise ValueError(f"The metric {name} is a {known} already and no {kind}: give one of them another name.")
        return numbers[0], numbers[1]

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
        for name, (kind, numerator, denominator) in values.items():
            if kind == "max":
                self.maximum(name, numerator)
            elif kind == "min":
                self.minimum(name, numerator)
            elif kind == "mean":
                self.mean(name, numerator, denominator)
            else:
                self.add(name, numerator)

    def reduce(self, comm: Reducer) -> dict[str, float]:
        """Returns the step's numbers over all ranks, sorted by name, and starts anew."""
        gathered = comm.all_gather_object(self._values)
        self._values = {}
        names = sorted({name for values in gathered for name in values})
        return {name: _combine([values[name] for values in gathered if name in values]) for name in names}


def _combine(parts: list[tuple[str, float, float]]) -> float:
    kind, values = parts[0][0], [value for _, value, _ in parts]
    if kind in ("max", "min"):
        return max(values) if kind == "max" else min(values)
    count = sum(count for _, _, count in parts) if kind == "mean" else 1.0
    return sum(values) / count if count else 0.0


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
