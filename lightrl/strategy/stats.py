"""strategy.stats: numbers that your own code records, by scope, reduced over all ranks and logged by a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrl.metrics import Stopwatch
from lightrl.strategy.foreign_models import Native
from lightrl.strategy.results import LossFn

_SCOPES: ContextVar[tuple[str, ...]] = ContextVar("scopes", default=())  # per thread or episode


class Stats:
    """Records numbers under the names of the open scopes. Names and counts may differ from rank to rank."""

    def __init__(self, strategy: Native) -> None:
        """strategy: read at every call, because its collectives and a trainer's statistics are set later."""
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
            name: Name inside the open scopes.
            values: This rank's values, perhaps none. The mean is over the values of all ranks and calls.
            mask: A tensor of the shape of values; only the values where it is true count.
        """
        numbers = _numbers(values, mask)
        full = _full(name)
        statistics = self._strategy.statistics
        statistics.values(f"{full}/mean", numbers)
        if numbers:
            statistics.minimum(f"{full}/min", min(numbers))
            statistics.maximum(f"{full}/max", max(numbers))

    def add(self, name: str, value: float) -> None:
        """Adds a number to the sum of this name over calls and ranks."""
        self._strategy.statistics.add(_full(name), _number(value))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Records mean, minimum and maximum of the seconds that the body takes, including the device's work."""
        watch = Stopwatch()
        with watch.measure(name):
            yield
        self.record(name, watch.take()[name])

    def export(self) -> dict[str, float]:
        """Returns the numbers over all ranks and starts over; for loops without a trainer. Every rank must call it."""
        return self._strategy.statistics.reduce(self._strategy.comm)


def once_each(strategy: Native, loss_fn: LossFn, num_own: int) -> LossFn:
    """Returns a loss function that records numbers of the first num_own micro-batches only: the others are repeats."""
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
        _refuse_shard(values)
        chosen = values.detach() if mask is None else values.detach()[mask]
        numbers: list[float] = chosen.flatten().double().tolist()
        return numbers
    if mask is not None:
        raise ValueError(f"stats.record() was given a mask beside a {type(values).__name__}: give both as tensors.")
    return [_number(value) for value in values] if isinstance(values, Sequence) else [_number(values)]


def _number(value: float) -> float:
    _refuse_shard(value)
    return float(value)


def _refuse_shard(value: Tensor | float) -> None:
    """float() of a DTensor is this rank's part, and only the caller knows whether all ranks could gather the whole."""
    if isinstance(value, DTensor):
        raise ValueError(
            f"strategy.stats was given a DTensor of shape {tuple(value.shape)}, of which this rank holds a part. Record"
            " its full_tensor(), which every rank must call, or its to_local(), this rank's part."
        )
