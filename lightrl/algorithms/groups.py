"""Statistics of samples that answer the same prompt. Members are known by a group id and may stand in any order.

Every member of a group must be there: where a group spans ranks, gather its rewards and ids first (a few numbers) and
keep one's own part of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Who is compared with whom: G groups of B samples."""

    member_of: Tensor  # [B] int64 in [0, G)
    sizes: Tensor  # [G] int64

    def sums(self, values: Tensor) -> Tensor:
        """[G] float64, since the sum must not hang on the order of the members."""
        return torch.zeros(len(self.sizes), dtype=torch.float64, device=values.device).index_add(
            0, self.member_of, values.double()
        )

    def means(self, values: Tensor) -> Tensor:
        """[B] float64: each sample has its group's mean."""
        return (self.sums(values) / self.sizes)[self.member_of]

    def stds(self, values: Tensor) -> Tensor:
        """[B] float64: each sample has its group's deviation, divided by size - 1 (Bessel); 0 in a group of one."""
        deviations = values.double() - self.means(values)
        variance = self.sums(deviations.square()) / (self.sizes - 1).clamp(min=1)
        return variance.sqrt()[self.member_of]

    def has_signal(self, values: Tensor) -> Tensor:
        """[B] bool: False where all members of the sample's group have exactly the same value."""
        lowest, highest = (self._extreme(values, how) for how in ("amin", "amax"))
        return (lowest != highest)[self.member_of]

    def num_others(self) -> Tensor:
        """[B] int64: how many other members each sample's group has."""
        return self.sizes[self.member_of] - 1

    def _extreme(self, values: Tensor, how: str) -> Tensor:
        empty = values.new_zeros(len(self.sizes))
        return empty.scatter_reduce(0, self.member_of, values, how, include_self=False)


def groups_of(group_ids: Tensor) -> Groups:
    """Numbers the groups by their ids, [B], which may be any integers."""
    require_flat(group_ids=group_ids)
    if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
        raise ValueError(f"group_ids is of {group_ids.dtype}: give an integer for each sample.")
    _, member_of, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return Groups(member_of=member_of, sizes=sizes)
