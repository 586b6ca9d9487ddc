"""Sequence parallelism inside a model: a group of ranks splits every pack, and each runs one part of it.

Each rank of the group starts with the same pack and ends with the scores of all its tokens, so losses need not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from lightrl.records import VisionInputs


class SequenceGroup(Protocol):
    """Ranks that split the tokens of a pack; in attention, which needs all tokens, they split the heads instead."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """The index of this rank in the group."""
        ...

    def exchange(self, part: Tensor) -> Tensor:
        """Exchanges a share of dim 1 for one of dim 2: heads for tokens, [1, heads, T / size, dim], or back."""

    def total(self, part: Tensor) -> Tensor:
        """Sums over the ranks; each summand gets the gradient of a single loss that all ranks share."""


class Tokens(Protocol):
    """The part of a PackedBatch, or of its split, that a decoder needs."""

    @property
    def input_ids(self) -> Tensor:
        """The token ids, [t] int64."""
        ...

    @property
    def position_ids(self) -> Tensor:
        """The positions, [t] or [3, t] int64."""
        ...

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """The boundaries of the sequences of the whole pack, from 0."""
        ...

    @property
    def vision(self) -> VisionInputs | None:
        """The images and videos that some of the tokens stand for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSplit:
    """The tokens of a pack that one rank runs."""

    input_ids: Tensor  # [t] int64
    position_ids: Tensor  # [t] or [3, t] int64
    cu_seqlens: tuple[int, ...]  # of the whole pack with its padding
    vision: VisionInputs | None = None  # all images of the pack, and this rank's tokens that stand for them


def split_tokens(batch: Tokens, group: SequenceGroup) -> TokenSplit:
    """Returns this rank's part of a pack.

    The pack is padded to a multiple of the group's size with an extra sequence, which nothing attends to and which is
    not scored.
    """
    num_tokens = batch.input_ids.shape[0]
    padding = -num_tokens % group.size
    length = (num_tokens + padding) // group.size
    mine = slice(group.rank * length, (group.rank + 1) * length)
    return TokenSplit(
        input_ids=F.pad(batch.input_ids, (0, padding))[mine],
        position_ids=F.pad(batch.position_ids, (0, padding))[..., mine],
        cu_seqlens=(*batch.cu_seqlens, num_tokens + padding) if padding else batch.cu_seqlens,
        vision=None if batch.vision is None else _split_vision(batch.vision, mine.start, mine.stop),
    )


def _split_vision(vision: VisionInputs, start: int, stop: int) -> VisionInputs:
    positions = vision.feature_positions
    is_mine = (positions >= start) & (positions < stop)
    return replace(vision, feature_positions=positions[is_mine] - start, feature_index=vision.feature_index[is_mine])


def apply_to_split(
    score: Callable[[Tensor, Tensor], tuple[Tensor, ...]], hidden: Tensor, positions: Tensor, group: SequenceGroup
) -> tuple[Tensor, ...]:
    """Scores positions of a pack whose hidden states are spread over several ranks; this is a collective.

    Args:
        score: takes m of this rank's hidden states, [m, H], and which of the positions they belong to, [m] int64 in
            [0, N); returns tensors of shape [m].
        hidden: [t, H], the hidden states of this rank's tokens.
        positions: [N] int64, positions in the whole pack.

    Returns:
        The results of score, as tensors of shape [N] that are the same on every rank.
    """
    rows, which = held_positions(positions, hidden.shape[0], group)
    return tuple(
        group.total(part.new_zeros(len(positions)).index_copy(0, which, part)) for part in score(hidden[rows], which)
    )


def held_positions(positions: Tensor, num_held: int, group: SequenceGroup) -> tuple[Tensor, Tensor]:
    """Returns which rows of this rank's hidden states belong to one of the positions, and to which of them."""
    start = group.rank * num_held
    which = ((positions >= start) & (positions < start + num_held)).nonzero()[:, 0]
    return positions[which] - start, which
