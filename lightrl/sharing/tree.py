"""The tree of a pack: tokens with which several of its sequences begin are computed once.

A hidden state depends only on the tokens up to its own, so sequences have the same states in a common prefix. Cut
where they part, the sequences are the paths of a tree: a prompt with responses as branches, or the turns of a
conversation. Segments are laid out parent first, each followed by all of its descendants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrl.records import PackedBatch
from lightrl.sharing.images import identified, kept_features

LEAST_SAVED = 4  # tokens that a common prefix must save, as each prefix costs some calls in every layer

_KEY, _WIDTH = ">i8", 8  # big-endian, so that the bytes sort like the integers
Tokens = NDArray[np.int64]


class Branch(NamedTuple):
    """A segment with descendants, all of which see it: tokens [start, stop) are seen by tokens [stop, end)."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """The U computed tokens of a pack's T, and for each of the T the computed one whose state it has."""

    kept: Tensor  # [U] int64 in [0, T), in the order of the layout
    source: Tensor  # [T] int64 in [0, U)
    cu_seqlens: tuple[int, ...]  # boundaries of the segments, from 0 to U
    branches: tuple[Branch, ...]  # parents before their descendants
    last: tuple[int, ...]  # S in [0, U): the last token of each sequence

    def to(self, device: torch.device) -> PrefixTree:
        """Copies the tensors to a device."""
        return replace(self, kept=self.kept.to(device), source=self.source.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBatch(PackedBatch):
    """A pack with a tree, whose common prefixes are computed once; its tensors are those of whole sequences."""

    tree: PrefixTree


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBatch(PackedBatch):
    """The computed tokens of a pack, with segments in place of sequences; it scores the same as the pack."""

    last: tuple[int, ...]

    @property
    def last_tokens(self) -> tuple[int, ...]:
        """The S positions of the last token of each sequence of the whole pack."""
        return self.last


def share(batch: PackedBatch) -> PackedBatch:
    """Returns a pack on the CPU with its tree and each image once; with no tree if no prefix is worth sharing."""
    batch, tree = tree_of(batch)
    return batch if tree is None else with_tree(batch, tree)


def tree_of(batch: PackedBatch, most: float = 1.0) -> tuple[PackedBatch, PrefixTree | None]:
    """Returns the pack with each image once, and its tree, which may compute the share `most` of the tokens."""
    batch, keys = (batch, batch.input_ids.numpy()) if batch.vision is None else identified(batch, batch.vision)
    return batch, prefix_tree(keys, batch.cu_seqlens, most)


def with_tree(batch: PackedBatch, tree: PrefixTree) -> SharedBatch:
    """Returns a pack with its tree."""
    return SharedBatch(**_columns(batch), tree=tree)


def kept_tokens(batch: PackedBatch, tree: PrefixTree) -> KeptBatch:
    """Returns the tokens of a pack that are computed."""
    vision = batch.vision
    changed: dict[str, Any] = {
        "input_ids": batch.input_ids[tree.kept],
        "position_ids": batch.position_ids[..., tree.kept],
        "cu_seqlens": tree.cu_seqlens,
        "score_index": tree.source[batch.score_index],
        "vision": None if vision is None else kept_features(vision, tree.kept, len(tree.source)),
    }
    return KeptBatch(**(_columns(batch) | changed), last=tree.last)


def _columns(batch: PackedBatch) -> dict[str, Any]:
    return {item.name: getattr(batch, item.name) for item in fields(PackedBatch)}


def num_computed(sequences: Sequence[Sequence[int]]) -> int:
    """Returns how many tokens are computed if these sequences form a pack."""
    keys = sorted(np.asarray(sequence, dtype=_KEY).tobytes() for sequence in sequences)
    return sum(stop - start for _, _, start, stop in _segments(keys))


def prefix_tree(tokens: Tokens, cu_seqlens: Sequence[int], most: float = 1.0) -> PrefixTree | None:
    """Returns the tree of sequences laid end to end; None if it saves nothing or computes too large a share."""
    keys = [tokens[start:end].astype(_KEY).tobytes() for start, end in pairwise(cu_seqlens)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    segments = list(_segments([keys[index] for index in order]))
    bounds = [0, *accumulate(stop - start for _, _, start, stop in segments)]
    if bounds[-1] == len(tokens) or bounds[-1] > most * len(tokens):
        return None
    source, kept = np.empty(len(tokens), dtype=np.int64), []
    begins = np.asarray(cu_seqlens)[order]
    for (first, last, start, stop), bound in zip(segments, bounds, strict=False):
        places = np.arange(start, stop)
        source[places + begins[first:last, None]] = places + (bound - start)
        kept.append(places + begins[first])
    return PrefixTree(
        kept=torch.from_numpy(np.concatenate(kept)),
        source=torch.from_numpy(source),
        cu_seqlens=tuple(bounds),
        branches=tuple(_branches(bounds, [(first, last) for first, last, _, _ in segments])),
        last=tuple(int(source[end - 1]) for end in cu_seqlens[1:]),
    )


def _segments(keys: Sequence[bytes]) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first, last, start, stop), parents first: sequences [first, last), sorted, share tokens [start, stop)."""
    common = [_common_length(one, other) for one, other in pairwise(keys)]
    pending = [(0, len(keys), 0)]  # sequences that share all tokens before the third number
    while pending:
        first, last, start = pending.pop()
        if last - first == 1:
            stop = len(keys[first]) // _WIDTH
        else:
            stop = min(common[first : last - 1])
            cuts = [index + 1 for index in range(first, last - 1) if common[index] == stop]
            # Otherwise each of the following parts, not each sequence, would begin with these tokens.
            is_worth = (stop - start) * len(cuts) >= LEAST_SAVED
            stop = stop if is_worth else start
            pending += [(a, b, stop) for a, b in reversed(list(pairwise([first, *cuts, last])))]
        if stop > start:
            yield first, last, start, stop


def _common_length(one: bytes, other: bytes) -> int:
    """Returns the number of tokens that two sequences begin with alike."""
    length = min(len(one), len(other))
    differing = int.from_bytes(one[:length], "big") ^ int.from_bytes(other[:length], "big")
    return (length - (differing.bit_length() + 7) // 8) // _WIDTH


def _branches(bounds: Sequence[int], spans: Sequence[tuple[int, int]]) -> Iterator[Branch]:
    """Yields the segments that have descendants, which directly follow and belong to some of the same sequences."""
    for index, (first, last) in enumerate(spans):
        following = index + 1
        while following < len(spans) and first <= spans[following][0] and spans[following][1] <= last:
            following += 1
        if following > index + 1:
            yield Branch(bounds[index], bounds[index + 1], bounds[following])
