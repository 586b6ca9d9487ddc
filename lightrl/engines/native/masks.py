"""Masks of decode steps as windows of one ramp, so that none is computed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightrl.engines.native.cache import ReadPart, RowCache, round_up


class DecodeMasks:
    """Makes the additive masks that attention starts from, for each sliding window of a model's layers."""

    def __init__(self, windows: Iterable[int | None], num_kv_heads: int) -> None:
        self.windows = frozenset(windows)
        self._num_kv_heads = num_kv_heads
        self._ramps = {window: torch.empty(0) for window in self.windows}

    def of(self, cache: RowCache, window: int | None, like: Tensor) -> list[Tensor]:
        """Returns a mask [rows * kv_heads or 1, 1, num_read] for each part of the step, of this dtype and device.

        A query at position p may look at what one at position 0 may, shifted by p: every row of the mask is a window
        of one ramp of [-inf, ..., -inf, 0, ..., 0, -inf, ..., -inf].
        """
        ramp, phase = self._ramp(cache.capacity, window, like), cache.decode_phase
        half = len(ramp) // 2
        if phase.shared_position is not None:
            return [ramp[half - phase.shared_position :][: phase.num_read].view(1, 1, -1)]
        starts = half - phase.positions
        return [self._windows(ramp, starts, part) for part in phase.parts]

    def at(self, cache: RowCache, window: int | None, like: Tensor, positions: Tensor) -> Tensor:
        """Returns the masks of queries at positions of any shape, [*positions.shape, num_read]."""
        ramp = self._ramp(cache.capacity, window, like)
        return ramp.unfold(0, cache.decode_phase.num_read, 1)[len(ramp) // 2 - positions]

    def _windows(self, ramp: Tensor, starts: Tensor, part: ReadPart) -> Tensor:
        rows = starts[part.rows].repeat_interleave(self._num_kv_heads)
        return ramp.unfold(0, part.num_read, 1)[rows][:, None]

    def _ramp(self, capacity: int, window: int | None, like: Tensor) -> Tensor:
        ramp = self._ramps[window]
        if len(ramp) < 2 * capacity or ramp.device != like.device or ramp.dtype != like.dtype:
            half = round_up(capacity, 256)
            distance = half - torch.arange(2 * half, device=like.device)  # from the query back to the key
            is_seen = (distance >= 0) & (distance < (half if window is None else window))
            ramp = torch.zeros(2 * half, dtype=like.dtype, device=like.device).masked_fill_(~is_seen, float("-inf"))
            self._ramps[window] = ramp
        return ramp
