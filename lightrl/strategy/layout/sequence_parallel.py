"""Sequence parallelism by Ulysses (arXiv:2309.14509): ranks split the tokens and, within attention, the heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class UlyssesGroup:
    """A lightrl.models.token_split.SequenceGroup over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def to_heads(self, part: Tensor) -> Tensor:
        """Exchanges a share of the tokens for a share of the heads."""
        return self._exchange(part, split_dim=1, join_dim=2)

    def to_tokens(self, part: Tensor) -> Tensor:
        """Exchanges a share of the heads for a share of the tokens."""
        return self._exchange(part, split_dim=1, join_dim=2)

    def total(self, part: Tensor) -> Tensor:
        """Returns the sum over the ranks of the group."""
        result: Tensor = _Total.apply(part, self._group)  # type: ignore[no-untyped-call]
        return result

    def _exchange(self, part: Tensor, *, split_dim: int, join_dim: int) -> Tensor:
        result: Tensor = _Exchange.apply(part, split_dim, join_dim, self._group)  # type: ignore[no-untyped-call]
        return result


class _Exchange(torch.autograd.Function):
    """Rank i gets the i-th piece along one dim from every rank and joins them along another; backward undoes it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dims, ctx.group = (split_dim, join_dim), group
        return _exchanged(part, split_dim, join_dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        split_dim, join_dim = ctx.dims
        return _exchanged(grads[0], join_dim, split_dim, ctx.group), None, None, None


def _exchanged(part: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup) -> Tensor:
    outgoing = torch.stack(part.chunk(dist.get_world_size(group), dim=split_dim))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return torch.cat(incoming.unbind(0), dim=join_dim)


class _Total(torch.autograd.Function):
    """A sum over ranks that all compute the same loss: each rank's summand gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None
