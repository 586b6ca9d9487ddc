"""The tree of a pack: tokens that several of its sequences begin with are computed once.

A hidden state depends on the tokens up to its own alone, so sequences with a common beginning have common states there.
Cut where they part, the sequences are the paths of a tree: a prompt with its responses as branches, or the turns of a
conversation. Its segments are laid out parent first, each followed by all its descendants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrl.records import PackedBatch

LEAST_SAVED = 16  # tokens that a common beginning must save, since each one costs some calls in every layer

Tokens = NDArray[np.int64]


class Branch(NamedTuple):
    """A segment with descendants, which see all of it: tokens [start, stop) are seen by [stop, end)."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """The U of a pack's T tokens that are computed, and the one of them whose state each token has."""

    kept: Tensor  # [U] int64 in [0, T), in the order of the layout
    source: Tensor  # [T] int64 in [0, U)
    cu_seqlens: tuple[int, ...]  # boundaries of the segments, from 0 to U
    branches: tuple[Branch, ...]  # parents before their descendants

    def to(self, device: torch.device) -> PrefixTree:
        """Copies the tensors to a device."""
        return replace(self, kept=self.kept.to(device), source=self.source.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBatch(PackedBatch):
    """A pack whose model computes common beginnings once. Its tensors are those of the whole sequences."""

    tree: PrefixTree


def share(batch: PackedBatch) -> PackedBatch:
    """Returns the pack with its tree; the pack itself if no beginning is worth sharing."""
    tree = prefix_tree(batch.input_ids.numpy(), batch.cu_seqlens)
    if len(tree.kept) == len(tree.source):
        return batch
    values: dict[str, Any] = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return SharedBatch(**values, tree=tree)


def num_computed(sequences: Sequence[Sequence[int]]) -> int:
    """Returns the number of tokens that are computed for these sequences in one pack."""
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    return sum(stop - start for _, _, start, stop in _segments(arrays, _sorted(arrays)))


def prefix_tree(tokens: Tokens, cu_seqlens: Sequence[int]) -> PrefixTree:
    """Returns the tree of sequences laid end to end."""
    sequences = [tokens[start:end] for start, end in pairwise(cu_seqlens)]
    order = _sorted(sequences)
    source, kept = np.empty(len(tokens), dtype=np.int64), []
    bounds, spans, num_kept = [0], [], 0
    for first, last, start, stop in _segments(sequences, order):
        length = stop - start
        for member in order[first:last]:
            offset = cu_seqlens[member]
            source[offset + start : offset + stop] = np.arange(num_kept, num_kept + length)
        offset = cu_seqlens[order[first]]
        kept.append(np.arange(offset + start, offset + stop))
        num_kept += length
        bounds.append(num_kept)
        spans.append((first, last))
    return PrefixTree(
        kept=torch.from_numpy(np.concatenate(kept)),
        source=torch.from_numpy(source),
        cu_seqlens=tuple(bounds),
        branches=tuple(_branches(bounds, spans)),
    )


def _sorted(sequences: Sequence[Tokens]) -> list[int]:
    """Returns the order of the tokens: as bytes, big-endian integers sort like the integers."""
    return sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">i8").tobytes())


def _segments(sequences: Sequence[Tokens], order: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first, last, start, stop), parents first: the sequences order[first:last] share tokens [start, stop)."""
    common = [_common_length(sequences[a], sequences[b]) for a, b in pairwise(order)]
    pending = [(0, len(order), 0)]  # sequences that share all tokens before the third number
    while pending:
        first, last, start = pending.pop()
        if last - first == 1:
            stop = len(sequences[order[first]])
        else:
            stop = min(common[first : last - 1])
            cuts = [index + 1 for index in range(first, last - 1) if common[index] == stop]
            is_worth = (stop - start) * (last - first - 1) >= LEAST_SAVED
            stop = stop if is_worth else start
            pending += [(a, b, stop) for a, b in reversed(list(pairwise([first, *cuts, last])))]
        if stop > start:
            yield first, last, start, stop


def _common_length(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _branches(bounds: Sequence[int], spans: Sequence[tuple[int, int]]) -> Iterator[Branch]:
    """Yields the segments that have descendants: those that follow at once, of some of the same sequences."""
    for index, (first, last) in enumerate(spans):
        following = index + 1
        while following < len(spans) and first <= spans[following][0] and spans[following][1] <= last:
            following += 1
        if following > index + 1:
            yield Branch(bounds[index], bounds[index + 1], bounds[following])
