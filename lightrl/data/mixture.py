"""Splits the name of a data set that is made of several, such as easy.jsonl*0.5 + hard.jsonl*3, and mixes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightrl.data.sampler import permutation

_Record = TypeVar("_Record")


class Part(NamedTuple):
    """One of the data sets, and how often each of its records stands in the whole; 0.5: every other one, on average."""

    name: str
    times: float

    def take(self, records: Sequence[_Record]) -> list[_Record]:
        """Returns the records as often as they stand in the whole; a part of them is drawn, always the same one."""
        whole = math.floor(self.times)
        num_more = math.floor((self.times - whole) * len(records) + 0.5)
        if not whole and not num_more:
            num_more = 1
        drawn = sorted(permutation(len(records), seed=0, epoch=0)[:num_more])
        return [*(list(records) * whole), *(records[index] for index in drawn)]


def parts_of(source: str) -> list[Part]:
    """Returns the data sets that a name adds up, in its order; one without + or * is one part.

    Raises ValueError for a part without a name, or with something else than a number above 0 behind its *.
    """
    if Path(source).exists():
        return [Part(source, 1)]
    return [_part(text.strip(), source) for text in source.split("+")]


def _part(text: str, source: str) -> Part:
    name, times = text, "1"
    if "*" in text and not Path(text).exists():
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
            f"an epoch, and not {times.strip()!r}. Several files are a directory, or a.jsonl + b.jsonl."
        )
    return Part(name.strip(), share)
