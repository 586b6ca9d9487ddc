"""Sequences whose items are made when they are asked for, so that a data set can be larger than memory."""

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
    """Makes an item each time it is asked for, and keeps none.

    Args:
        length: the number of items.
        make: returns the item of an index from 0 to length - 1, always the same one.
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
    """Returns make(index, item) for each item: a list, or of streamed items a sequence that is streamed too."""
    if isinstance(items, Streamed):
        return Streamed(len(items), lambda index: make(index, items[index]))
    return [make(index, item) for index, item in enumerate(items)]


def select(items: Sequence[Item], indices: Sequence[int]) -> Sequence[Item]:
    """Returns the items at the indices: a list, or of streamed items a sequence that is streamed too."""
    if not isinstance(items, Streamed):
        return [items[index] for index in indices]
    kept = indices if isinstance(indices, range) else np.asarray(indices, dtype=np.int64)
    return Streamed(len(kept), lambda index: items[int(kept[index])])


def chain(parts: Sequence[Sequence[Item]]) -> Sequence[Item]:
    """Returns the items of all parts, one part after the other: a list, or streamed if one of the parts is."""
    if not any(isinstance(part, Streamed) for part in parts):
        return [item for part in parts for item in part]
    ends = np.cumsum([len(part) for part in parts])

    def item_at(index: int) -> Item:
        part = int(np.searchsorted(ends, index, side="right"))
        return parts[part][index - int(ends[part])]  # counted from the end of the part

    return Streamed(int(ends[-1]), item_at)


def stream_lines(path: Path, parse: Callable[[bytes, str], Item]) -> Sequence[Item]:
    """Returns what parse(line, where) makes of each line that is not blank, read from the file when it is asked for.

    The file is read once here, to find where its lines begin: 20 bytes of memory a line. It is opened anew for each
    line, since a process may not keep thousands of files open; ValueError if it has changed.
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
