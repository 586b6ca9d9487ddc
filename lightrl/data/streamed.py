"""Sequences that make each item when it is requested, so that a data set can be larger than memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar, overload

import numpy as np

Item = TypeVar("Item")
Made = TypeVar("Made")


class Streamed(Sequence[Item], Generic[Item]):
    """A sequence that makes an item at each request and keeps none.

    Args:
        make: returns the item at an index from 0 to length - 1, always the same one.
    """

    def __init__(self, length: int, make: Callable[[int], Item]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        chosen = range(self._length)[index]  # also raises IndexError
        return self._make(chosen) if isinstance(chosen, int) else select(self, chosen)


def make_each(items: Sequence[Item], make: Callable[[int, Item], Made]) -> Sequence[Made]:
    """Returns make(index, item) for each item, as a list, or as a streamed sequence if the items are streamed."""
    if isinstance(items, Streamed):
        return Streamed(len(items), lambda index: make(index, items[index]))
    return [make(index, item) for index, item in enumerate(items)]


def select(items: Sequence[Item], indices: Sequence[int]) -> Sequence[Item]:
    """Returns the items at the indices, as a list, or as a streamed sequence if the items are streamed."""
    if not isinstance(items, Streamed):
        return [items[index] for index in indices]
    kept = indices if isinstance(indices, range) else np.asarray(indices, dtype=np.int64)
    return Streamed(len(kept), lambda index: items[int(kept[index])])


def chain(parts: Sequence[Sequence[Item]]) -> Sequence[Item]:
    """Returns the items of all parts in order, as a list, or as a streamed sequence if any part is streamed."""
    if not any(isinstance(part, Streamed) for part in parts):
        return [item for part in parts for item in part]
    ends = np.cumsum([len(part) for part in parts])

    def item_at(index: int) -> Item:
        part = int(np.searchsorted(ends, index, side="right"))
        return parts[part][index - int(ends[part])]  # a negative index, counted from the end of the part

    return Streamed(int(ends[-1]), item_at)


def stream_lines(path: Path, parse: Callable[[bytes, str], Item]) -> Sequence[Item]:
    """Returns a sequence of parse(line, where) for each line that is not blank; a line is read when it is used.

    The file is read once here to find where its lines begin, which takes 20 bytes of memory for each line. It is opened
    again for each line, because a process cannot keep thousands of files open. Raises ValueError if it has changed.
    """
    starts, sizes, numbers = array("q"), array("q"), array("i")
    position = 0
    with path.open("rb") as lines:
        version = _version(lines)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                starts.append(position)
                sizes.append(len(line))
                numbers.append(number)
            position += len(line)

    def line_at(index: int) -> Item:
        with path.open("rb") as file:
            if _version(file) != version:
                raise ValueError(f"{path} has changed since the run began, which streams it. Start the run again.")
            file.seek(starts[index])
            return parse(file.read(sizes[index]), f"{path}:{numbers[index]}")

    return Streamed(len(starts), line_at)


def _version(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns
