"""Splits the name of a data set that is made of several, such as easy.jsonl*0.5 + hard.jsonl*3, and mixes them."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightrl.data.sampler import permutation
from lightrl.data.streamed import select

_Record = TypeVar("_Record")


class Part(NamedTuple):
    """One of the data sets, and how often each of its records stands in the whole; 0.5: every other one, on average."""

    name: str
    times: float

    def take(self, records: Sequence[_Record]) -> Sequence[_Record]:
        """Returns the records as often as they stand in the whole; a part of them is drawn, always the same one."""
        whole = math.floor(self.times)
        num_more = math.floor((self.times - whole) * len(records) + 0.5)
        if not whole and not num_more:
            num_more = 1
        if whole == 1 and not num_more:
            return records
        drawn = sorted(permutation(len(records), seed=0, epoch=0)[:num_more])
        return select(records, [*(list(range(len(records))) * whole), *drawn])


def files_of(pattern: str) -> list[Path]:
    """Returns the files that a pattern such as data/part-*.jsonl stands for, by name; none if it is no pattern."""
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return []
    return [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]


def parts_of(source: str) -> list[Part]:
    """Returns the data sets that a name adds up, in its order; one without + or * is one part.

    Raises ValueError for a part without a name, or with something else than a number above 0 behind its *.
    """
    if Path(source).exists():
        return [Part(source, 1)]
    return [_part(text.strip(), source) for text in source.split("+")]


def _part(text: str, source: str) -> Part:
    name, times = text, "1"
    if "*" in text and not Path(text).exists() and not files_of(text):
        name, _, times = text.rpartition("*")
    if not name.strip():
        raise ValueError(f"The data set {source!r} has a part without a name: write a.jsonl + b.jsonl*3.")
    try:
        share = float(times)
    except ValueError:
        share = 0
    if not 0 < share < math.inf:
        raise ValueError(
            f"The part {text!r} of the data set: behind * stands a number above 0, how often its records are taken in "
            f"an epoch, and not {times.strip()!r}. If {text!r} is a pattern, no file matches it."
        )
    return Part(name.strip(), share)
