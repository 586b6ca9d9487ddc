"""Sequence parallelism on paper: a rank's part, without other ranks and without messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.models import token_split
from lightrl.models.token_split import SequenceGroup


class PaperGroup:
    """A SequenceGroup whose messages have only sizes, those of strategy/layout/sequence_parallel.py."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def to_heads(self, part: Tensor) -> Tensor:
        """Exchanges a share of the tokens for a share of the heads."""
        return self._exchange(part)

    def to_tokens(self, part: Tensor) -> Tensor:
        """Exchanges a share of the heads for a share of the tokens."""
        return self._exchange(part)

    def total(self, part: Tensor) -> Tensor:
        """Returns a tensor of the sum's size."""
        return part.clone()

    def _exchange(self, part: Tensor) -> Tensor:
        result: Tensor = _Exchange.apply(part, 1, 2, self.size)  # type: ignore[no-untyped-call]
        return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, split_dim: int, join_dim: int, size: int) -> Tensor:
        ctx.dims, ctx.size = (split_dim, join_dim), size
        return _exchanged(part, split_dim, join_dim, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        split_dim, join_dim = ctx.dims
        return _exchanged(grads[0], join_dim, split_dim, ctx.size), None, None, None


def _exchanged(part: Tensor, split_dim: int, join_dim: int, size: int) -> Tensor:
    outgoing = torch.stack(part.chunk(size, dim=split_dim))
    incoming = torch.empty_like(outgoing)
    return torch.cat(incoming.unbind(0), dim=join_dim)


@contextmanager
def split_over(module: nn.Module, sp_size: int) -> Iterator[None]:
    """Makes a model run one rank's part of a pack inside the context; 1 changes nothing."""
    if sp_size == 1:
        yield
        return
    splittable: Any = module
    splittable.sequence_group = PaperGroup(sp_size)
    own = token_split.held_positions
    token_split.held_positions = _evenly_held  # a rank's tokens depend on values, which fake tensors lack
    try:
        yield
    finally:
        token_split.held_positions = own


def _evenly_held(positions: Tensor, num_held: int, group: SequenceGroup) -> tuple[Tensor, Tensor]:
    share = positions.new_zeros(min(num_held, -(-len(positions) // group.size)))
    return share, share
