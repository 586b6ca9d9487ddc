"""Branches of an episode: its conversations form one sample until that has an advantage, which each of them gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from lightrl.records import Experience

_STRIDE = 1_000_000  # the k-th branch of sample i has the index i + k * _STRIDE, beyond every group


def branch_indices(sample_index: int) -> Iterable[int]:
    """Returns the sample indices of the branches of a sample."""
    return count(sample_index + _STRIDE, _STRIDE)


def with_branches(experience: Sequence[Experience]) -> list[Experience]:
    """Returns the experience, followed by each of its branches as a sample of its own."""
    return [
        part
        for item in experience
        for part in (
            replace(item, sample=replace(item.sample, branches=())),
            *(replace(item, sample=replace(branch, position=item.sample.position)) for branch in item.sample.branches),
        )
    ]
