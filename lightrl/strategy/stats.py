"""strategy.stats: numbers of your own code, by scope, reduced over all ranks; a trainer logs them with its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, Protocol

from torch import Tensor

from lightrl.comm import Comm
from lightrl.metrics import Statistics, Stopwatch
from lightrl.strategy.results import LossFn

_SCOPES: ContextVar[tuple[str, ...]] = ContextVar("scopes", default=())  # of this thread, or of this episode


class Counting(Protocol):
    """What Stats needs of the strategy whose numbers it takes."""

    statistics: Statistics

    @property
    def comm(self) -> Comm: ...


class Stats:
    """Takes numbers under the names of the open scopes. Ranks may record other names, and other numbers of values."""

    def __init__(self, strategy: Counting) -> None:
        """strategy: asked at each number, since its collectives and a trainer's statistics come later."""
        self._strategy = strategy

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Puts a name and a slash in front of every name that the body records; scopes may be nested."""
        token = _SCOPES.set((*_SCOPES.get(), name))
        try:
            yield
        finally:
            _SCOPES.reset(token)

    def record(self, name: str, values: Tensor | Sequence[float] | float, mask: Tensor | None = None) -> None:
        """Adds values to name/mean, name/min and name/max.

        Args:
            name: In the open scopes.
            values: Of this rank; none is fine. The mean is over the values of all ranks and calls.
            mask: Of the same shape as values, a tensor; only those where it is true count.
        """
        numbers = _numbers(values, mask)
        full = _full(name)
        statistics = self._strategy.statistics
        statistics.values(f"{full}/mean", numbers)
        if numbers:
            statistics.minimum(f"{full}/min", min(numbers))
            statistics.maximum(f"{full}/max", max(numbers))

    def add(self, name: str, value: float) -> None:
        """Adds to the sum over calls and ranks that has this name."""
        self._strategy.statistics.add(_full(name), value)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Records the seconds of the body, the device's work included: their mean, minimum and maximum."""
        watch = Stopwatch()
        with watch.measure(name):
            yield
        self.record(name, watch.take()[name])

    def export(self) -> dict[str, float]:
        """Returns the numbers over all ranks, and starts anew; every rank calls it, in a loop without a trainer."""
        return self._strategy.statistics.reduce(self._strategy.comm)


def once_each(strategy: Counting, loss_fn: LossFn, num_own: int) -> LossFn:
    """Returns the loss function; of micro-batches after the first num_own, which are repeats, it records nothing."""
    calls = count()

    def compute(output: Any, batch: Any) -> Tensor:
        if next(calls) < num_own:
            return loss_fn(output, batch)
        with strategy.statistics.kept():
            return loss_fn(output, batch)

    return compute


def _full(name: str) -> str:
    return "/".join((*_SCOPES.get(), name))


def _numbers(values: Tensor | Sequence[float] | float, mask: Tensor | None) -> list[float]:
    if isinstance(values, Tensor):
        chosen = values.detach() if mask is None else values.detach()[mask]
        numbers: list[float] = chosen.flatten().double().tolist()
        return numbers
    if mask is not None:
        raise ValueError(f"stats.record() was given a mask beside a {type(values).__name__}: give both as tensors.")
    return [float(value) for value in values] if isinstance(values, Sequence) else [float(values)]
