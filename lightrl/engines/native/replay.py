"""Replays the decode steps of the fused forward as CUDA graphs.

A step launches some twenty small kernels per layer. Launched one by one, they take a GPU several times as long as they
compute. A graph launches all of them at once, but always with the same numbers of rows and of positions that are read.
Both are rounded up, and there is a graph for each pair. It reads tokens and positions from buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from lightrl.engines.native.cache import RowCache, round_up

_LEAST_ROWS = 8
_LEAST_READ = 256

Replay: TypeAlias = Callable[[], None]  # computes again, from the same memory into the same memory


class Launched(Protocol):
    """A forward that launches every operation: forward.FusedForward."""

    def prefill(self, ids: Tensor, last: Tensor, cache: RowCache) -> Tensor: ...

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: RowCache, rope_deltas: Tensor | None = None
    ) -> Tensor: ...

    def refresh(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured step, and the memory that it reads and writes."""

    replay: Replay
    logits: Tensor  # [rows, vocab]
    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64


def capture(compute: Callable[[], Tensor], pool: Any) -> tuple[Replay, Tensor]:
    """Captures a computation as a CUDA graph, without running it; returns its replay and its result's memory."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: meanwhile other threads, such as NCCL's, may ask the device how far it is.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = compute()
    return graph.replay, result


class ReplayedForward:
    """A fused forward on a GPU whose decode steps are captured when a shape first occurs, and replayed from then on.

    Padding rows write to rows of the cache that no sample has, and their logits are cut off.
    """

    def __init__(self, forward: Launched) -> None:
        self._forward = forward
        self._steps: dict[tuple[int, int], _Step] = {}  # by numbers of rows and of positions read
        self._size = (0, 0)  # of the cache that they read
        self._pool: Any = None  # memory that all graphs share, since only one of them runs at a time

    def refresh(self) -> None:
        """Recomputes the tensors derived from the weights and drops the graphs, which would read the old memory."""
        self._drop()
        self._forward.refresh()

    def prefill(self, ids: Tensor, last: Tensor, cache: RowCache) -> Tensor:
        """Returns logits [b, vocab] after index last[j] of each row of ids [b, t]."""
        return self._forward.prefill(ids, last, cache)

    def decode(self, tokens: Tensor, positions: Tensor, cache: RowCache, rope_deltas: Tensor | None = None) -> Tensor:
        """Returns logits [n, vocab] of tokens [n] at positions [n], in memory that the next call overwrites."""
        if len(cache.decode_phase.parts) > 1:  # worth their launches, as reading all rows alike would take longer
            return self._forward.decode(tokens, positions, cache, rope_deltas)
        if self._size != (cache.num_rows, cache.capacity):
            self._drop()
            self._size = (cache.num_rows, cache.capacity)
        num_rows = min(_rounded(len(tokens), _LEAST_ROWS), cache.num_rows)
        num_read = min(_rounded(cache.decode_phase.num_read, _LEAST_READ), cache.capacity)
        step = self._steps.get((num_rows, num_read))
        if step is None:
            return self._first(num_rows, num_read, tokens, positions, cache)
        step.tokens[: len(tokens)] = tokens
        step.positions[: len(tokens)] = positions
        step.replay()
        return step.logits[: len(tokens)]

    def _first(self, num_rows: int, num_read: int, tokens: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """Runs a step of a new shape, and captures it."""
        buffers = (tokens.new_zeros(num_rows), positions.new_zeros(num_rows))
        for buffer, values in zip(buffers, (tokens, positions), strict=True):
            buffer[: len(values)] = values

        def compute() -> Tensor:
            # A lowest position below all: no position is known to be that of every row.
            cache.begin_decode(buffers[1], -1, num_read - 1)
            return self._forward.decode(*buffers, cache)

        logits = compute()  # makes tables and work space of libraries, which a capture must not do
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._steps[num_rows, num_read] = _Step(*capture(compute, self._pool), *buffers)
        return logits[: len(tokens)]

    def _drop(self) -> None:
        self._steps.clear()
        self._pool = None  # without graphs, torch gives the memory of this one up


def _rounded(count: int, least: int) -> int:
    """Rounds up to a multiple of `least`, or of a power of two that is at most a quarter of the count."""
    return round_up(count, max(least, 1 << max(0, (count - 1).bit_length() - 3)))
