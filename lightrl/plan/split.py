"""Sequence parallelism on paper: a rank's part, without other ranks and without messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.models import token_split
from lightrl.models.token_split import SequenceGroup
from lightrl.strategy.layout.sequence_parallel import UlyssesGroup


class PaperGroup(UlyssesGroup):
    """A group of ranks whose messages have only sizes."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def swap(self, outgoing: Tensor) -> Tensor:
        """Returns a tensor of the size of what the ranks send."""
        return torch.empty_like(outgoing)

    def total(self, part: Tensor) -> Tensor:
        """Returns a tensor of the sum's size."""
        return part.clone()


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
