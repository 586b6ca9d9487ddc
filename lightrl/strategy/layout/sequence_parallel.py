"""Sequence parallelism by Ulysses (arXiv:2309.14509): ranks split the tokens and, within attention, the heads."""

from __future__ import annotations

from collections.abc import Callable
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

    def exchange(self, part: Tensor) -> Tensor:
        """Rank i gets the i-th share of dim 1 from every rank and joins them along dim 2; the backward undoes it."""
        result: Tensor = _Exchange.apply(part, 1, 2, self.size, self.swap)  # type: ignore[no-untyped-call]
        return result

    def swap(self, outgoing: Tensor) -> Tensor:
        """Sends outgoing[i] to rank i of the group; returns what each rank sent here, in their order."""
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self._group)
        return incoming

    def total(self, part: Tensor) -> Tensor:
        """Returns the sum over the ranks of the group."""
        result: Tensor = SumOverRanks.apply(part, self._group)  # type: ignore[no-untyped-call]
        return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, split_dim: int, join_dim: int, size: int, swap: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.settings = (join_dim, split_dim, size, swap)
        incoming = swap(torch.stack(part.chunk(size, dim=split_dim)))
        return torch.cat(incoming.unbind(0), dim=join_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grads[0], *ctx.settings), None, None, None, None  # type: ignore[no-untyped-call]


class SumOverRanks(torch.autograd.Function):
    """A sum over ranks that all compute the same loss: each rank's summand gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
