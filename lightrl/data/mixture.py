"""Parses and mixes data sets that are given as a sum, such as easy.jsonl*0.5 + hard.jsonl*3."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightrl.data.sampler import permutation
from lightrl.data.streamed import select

_Record = TypeVar("_Record")


class Part(NamedTuple):
    """One data set of a sum, and how often the sum contains each of its records; 0.5: every other one on average."""

    name: str
    times: float

    def take(self, records: Sequence[_Record]) -> Sequence[_Record]:
        """Returns the records as often as the sum contains them; a fraction is drawn at random, always the same one."""
        whole = math.floor(self.times)
        num_more = math.floor((self.times - whole) * len(records) + 0.5)
        if not whole and not num_more:
            num_more = 1
        if whole == 1 and not num_more:
            return records
        drawn = sorted(permutation(len(records), seed=0, epoch=0)[:num_more])
        return select(records, [*(list(range(len(records))) * whole), *drawn])


def files_of(name: str) -> list[Path]:
    """Returns the file of this name, or else those that match it as a pattern such as part-*.jsonl, sorted by name."""
    found = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
    return [Path(path) for path in found if Path(path).is_file()]


def parts_of(source: str) -> list[Part]:
    """Returns the data sets of a sum, in its order; a name without + or * is a single part.

    Raises ValueError for a part without a name, or for a factor after * that is not a number above 0.
    """
    if os.path.exists(source):  # Path raises an error for a sum that is longer than the name of a file may be
        return [Part(source, 1)]
    return [_part(text.strip(), source) for text in source.split("+")]


def _part(text: str, source: str) -> Part:
    name, times = text, "1"
    if "*" in text and not os.path.exists(text) and not files_of(text):
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
