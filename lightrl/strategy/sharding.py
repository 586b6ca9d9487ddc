"""Where the values of a sharded parameter lie: what a rank holds of it, and the whole from what all ranks hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

TENSOR_AXIS = "tp"  # of a device mesh; the other axis that shards is FSDP's


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A tensor cut into equal parts by tensor parallelism, and each part by rows into FSDP's shards.

    The last shards of a part have fewer rows than the first, or none.
    """

    num_shards: int
    shard: int  # of this rank
    num_parts: int = 1
    part: int = 0
    part_dim: int = 0

    def shape_of_part(self, whole: torch.Size) -> torch.Size:
        sizes = list(whole)
        sizes[self.part_dim] //= self.num_parts
        return torch.Size(sizes)

    def num_rows(self, whole: torch.Size) -> int:
        """Of the first shards, and of all when padded."""
        return -(-self.shape_of_part(whole)[0] // self.num_shards)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor, a view of it."""
        part = whole.chunk(self.num_parts, dim=self.part_dim)[self.part]
        rows = self.num_rows(whole.shape)
        return part[rows * self.shard : rows * (self.shard + 1)]

    def joined(self, shards: Tensor, whole: torch.Size) -> Tensor:
        """The whole tensor from the padded shards of all ranks, [num_shards x num_parts, elements]."""
        shape, rows = self.shape_of_part(whole), self.num_rows(whole)
        grid = shards.reshape(self.num_shards, self.num_parts, rows, *shape[1:]).movedim(1, 0)
        parts = grid.reshape(self.num_parts, self.num_shards * rows, *shape[1:])[:, : shape[0]]
        return parts[0] if self.num_parts == 1 else torch.cat(parts.unbind(0), dim=self.part_dim)


def sharding_of(tensor: DTensor) -> Sharding | None:
    """None for a layout that is not of FSDP and tensor parallelism: torch must work that out."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    found: dict[str, int] = {}
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        dim, size, rank = getattr(placement, "dim", None), mesh.size(axis), mesh.get_local_rank(axis)
        if dim is None or (names[axis] != TENSOR_AXIS and (dim != 0 or "num_shards" in found)):
            return None
        if names[axis] == TENSOR_AXIS:
            found |= {"num_parts": size, "part": rank, "part_dim": dim}
        else:
            found |= {"num_shards": size, "shard": rank}
    return Sharding(**{"num_shards": 1, "shard": 0, **found})
