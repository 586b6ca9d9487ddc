"""Splits the name of a data set that is made of several, such as easy.jsonl + hard.jsonl*3."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """One of the data sets, and how often each of its records stands in the whole."""

    name: str
    times: int


def parts_of(source: str) -> list[Part]:
    """Returns the data sets that a name adds up, in its order; one without + or * is one part.

    Raises ValueError for a part without a name, or with something else than a whole number behind its *.
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
    if not times.strip().isdecimal() or int(times) < 1:
        raise ValueError(
            f"The part {text!r} of the data set: behind * stands a whole number, how often its records are taken in an "
            f"epoch, and not {times.strip()!r}. Several files are a directory, or a.jsonl + b.jsonl."
        )
    return Part(name.strip(), int(times))
