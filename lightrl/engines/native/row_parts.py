"""Decides which rows of the cache a decode step reads together; uses only numbers, no tensors.

Attention reads a row up to the longest position among the rows that are read with it. If a few samples are much longer
than the others, as when some continue from an earlier step, most of what is read would be padding. So the rows are cut
into runs, each of which is read to its own length, and sorted if they are too mixed to be cut well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_SAVED_ON_CPU = 1024  # positions per step: reading these takes as long as the operations on one more part
LEAST_SAVED = 1 << 18  # on a GPU, where only a step that reads all rows alike can be replayed as a graph
_MOST_CUTS = 3
_WORTH_SORTING = 16  # steps within which a sort must save as many positions as it copies


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows start .. stop - 1 and their highest position."""

    start: int
    stop: int
    highest: int


def cut(positions: NDArray[np.int64], least_saved: int) -> list[RowPart]:
    """Cuts the rows where that saves most, for as long as a cut saves at least least_saved positions.

    Args:
        positions: [n] of the rows.
        least_saved: the cost of one more part's operations, in positions read.
    """
    parts = [RowPart(0, len(positions), int(positions.max()))]
    for _ in range(_MOST_CUTS):
        saved, at, index = max((*_best_cut(positions[part.start : part.stop]), i) for i, part in enumerate(parts))
        if saved < max(1, least_saved):
            break
        part, middle = parts[index], parts[index].start + at
        halves = ((part.start, middle), (middle, part.stop))
        parts[index : index + 1] = [RowPart(*rows, int(positions[slice(*rows)].max())) for rows in halves]
    return parts


def _best_cut(positions: NDArray[np.int64]) -> tuple[int, int]:
    """Returns the positions that the best cut of these rows saves, and the number of rows before the cut."""
    if len(positions) < 2:
        return 0, 0
    before = np.maximum.accumulate(positions)[:-1]
    behind = np.maximum.accumulate(positions[::-1])[-2::-1]
    num_before = np.arange(1, len(positions))
    read = before * num_before + behind * (len(positions) - num_before)
    at = int(read.argmin())
    return int(positions.max()) * len(positions) - int(read[at]), at + 1


def at_positions(parts: list[RowPart], positions: NDArray[np.int64]) -> list[RowPart]:
    """Returns the parts with the current positions of their rows."""
    return [RowPart(part.start, part.stop, int(positions[part.start : part.stop].max())) for part in parts]


def num_read(parts: list[RowPart]) -> int:
    """Returns the number of positions that a step reads, including the one that it writes in each row."""
    return sum((part.stop - part.start) * (part.highest + 1) for part in parts)


def sorted_rows(positions: NDArray[np.int64], least_saved: int) -> NDArray[np.int64] | None:
    """Returns the rows sorted from longest to shortest, [n]; None if moving them costs more than it saves."""
    order = np.argsort(-positions, kind="stable")
    copied = np.count_nonzero(order != np.arange(len(order))) * int(positions.max())
    saved = num_read(cut(positions, least_saved)) - num_read(cut(positions[order], least_saved))
    return order if saved * _WORTH_SORTING > copied and saved >= least_saved else None
