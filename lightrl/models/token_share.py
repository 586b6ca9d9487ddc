"""The tokens of a pack that one rank runs, where a group of ranks splits every pack among them.

Each rank of the group has the same pack and ends with the scores of all its tokens, so a loss need not know of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lightrl.records import PackedBatch


class SequenceGroup(Protocol):
    """Ranks that split the tokens of a pack; attention, which needs all tokens, they split by heads instead."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def to_heads(self, part: Tensor) -> Tensor:
        """From all heads of this rank's tokens, [1, heads, T / size, dim], to its heads of all tokens."""

    def to_tokens(self, part: Tensor) -> Tensor:
        """From this rank's heads of all tokens, [1, T, heads / size, dim], to all heads of its tokens."""

    def total(self, part: Tensor) -> Tensor:
        """The sum over the ranks; its gradient goes to each summand as if every rank had the one loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShare:
    """What a rank runs of a pack."""

    input_ids: Tensor  # [t] int64
    position_ids: Tensor  # [t] or [3, t] int64
    cu_seqlens: tuple[int, ...]  # of the whole pack with its padding


def token_share(batch: PackedBatch, group: SequenceGroup | None) -> TokenShare:
    """This rank's share; without a group the whole pack.

    The pack is padded to a multiple of the group's size by a sequence of its own, which nothing else attends to and
    nothing scores.
    """
    num_tokens = batch.input_ids.shape[0]
    if group is None:
        return TokenShare(input_ids=batch.input_ids, position_ids=batch.position_ids, cu_seqlens=batch.cu_seqlens)
    padding = -num_tokens % group.size
    length = (num_tokens + padding) // group.size
    own = slice(group.rank * length, (group.rank + 1) * length)
    return TokenShare(
        input_ids=F.pad(batch.input_ids, (0, padding))[own],
        position_ids=F.pad(batch.position_ids, (0, padding))[..., own],
        cu_seqlens=(*batch.cu_seqlens, num_tokens + padding) if padding else batch.cu_seqlens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Those of N places in a pack that lie in this rank's share: m of them."""

    which: Tensor  # [m] int64 in [0, N)
    places: Tensor  # [m] int64 in this rank's hidden states
    num_places: int  # N
    group: SequenceGroup | None

    def joined(self, values: Tensor) -> Tensor:
        """[m] values of this rank's places as the [N] of all places, the same on every rank; a collective."""
        if self.group is None:
            return values
        return self.group.total(values.new_zeros(self.num_places).index_copy(0, self.which, values))


def pick(places: Tensor, hidden: Tensor, group: SequenceGroup | None) -> Picked:
    """places: [N] int64 in the pack. hidden: [t, H] of this rank's share."""
    if group is None:
        which = torch.arange(places.shape[0], device=places.device)
        return Picked(which=which, places=places, num_places=places.shape[0], group=None)
    start = group.rank * hidden.shape[0]
    which = ((places >= start) & (places < start + hidden.shape[0])).nonzero()[:, 0]
    return Picked(which=which, places=places[which] - start, num_places=places.shape[0], group=group)
