"""Which rows of a DTensor this rank holds, where it is sharded along dim 0 and nowhere else."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


class OwnRows(NamedTuple):
    """Rows [start, stop) of dim 0; the last ranks may have none."""

    start: int
    stop: int
    is_first_replica: bool  # of the ranks that hold the same rows exactly one is


def own_rows(tensor: Tensor) -> OwnRows | None:
    """None for a plain tensor and for every other layout."""
    if not isinstance(tensor, DTensor):
        return None
    sharded = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is Shard]
    replicated = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    coordinate = tensor.device_mesh.get_coordinate()
    if len(sharded) != 1 or len(sharded) + len(replicated) != tensor.device_mesh.ndim or coordinate is None:
        return None
    (axis,) = sharded
    if tensor.placements[axis] != Shard(0):
        return None
    length = tensor.shape[0]
    at_most = -(-length // tensor.device_mesh.size(axis))
    start = min(coordinate[axis] * at_most, length)
    stop = min(start + at_most, length)
    assert tensor.to_local().shape[0] == stop - start, (tensor.to_local().shape, start, stop)
    return OwnRows(start, stop, not any(coordinate[axis] for axis in replicated))
