"""DTensorLayout: parameters sharded as DTensors, by FSDP, by tensor parallelism, or by both.

Sharded parameters are gathered in buckets: many tensors with one collective, in bounded memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from lightrl.comm import Comm
from lightrl.engines.base import NamedTensors
from lightrl.engines.weights.fingerprint import Span, span_of
from lightrl.models.router_biases import as_sent
from lightrl.parcels import all_gather_flat
from lightrl.strategy.layout.buckets import buckets
from lightrl.strategy.layout.plain import Piece, PlainLayout, Rows, pieces_of_shards

_HOST_BUCKET_BYTES = 16 << 20  # on a CPU, so that gathered tensors are still in its cache when they are joined and read
TENSOR_AXIS = "tp"  # the mesh axis of tensor parallelism; the other axis that shards is FSDP's


class DTensorLayout(PlainLayout):
    """Reads and writes parameters that are DTensors, and plain ones in the same model."""

    def __init__(
        self,
        comm: Comm,
        *,
        device: torch.device,
        bucket_bytes: int = 512 << 20,
        replica: ProcessGroup | None = None,
    ) -> None:
        """Sets up how parameters are gathered.

        Args:
            device: where gathered tensors lie.
            bucket_bytes: the size of the whole tensors held at a time; a larger tensor is a bucket of its own.
            replica: the ranks that together hold one whole model; needed for tensors that tensor parallelism
            cuts.
        """
        super().__init__(comm)
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._replica = replica

    def is_whole(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, DTensor)

    def detached(self, parameter: Tensor) -> Tensor:
        return parameter if isinstance(parameter, DTensor) else parameter.detach()  # slow, and not needed for a gather

    def shard(self, parameter: Tensor) -> Tensor:
        return local(parameter).detach()

    def shard_of_whole(self, parameter: Tensor, whole: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return whole
        sharding = sharding_of(parameter)
        if sharding is not None:
            return sharding.cut(whole)
        whole = whole.to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()

    def rows(self, tensor: Tensor) -> Rows | None:
        return rows_of(tensor)

    def pieces(self, named: NamedTensors) -> Iterator[Piece]:
        return pieces_of_shards(self, named)

    def span(self, parameter: Tensor) -> Span:
        if not isinstance(parameter, DTensor):
            return super().span(parameter)
        sharding = sharding_of(parameter)
        if sharding is not None:
            return span_of_shard(sharding, parameter.shape)
        return span_of(parameter.shape, local(parameter).shape, _offsets(parameter))

    def is_first_holder(self, parameter: Tensor) -> bool:
        if not isinstance(parameter, DTensor):
            return super().is_first_holder(parameter)
        return _is_first_holder(parameter.device_mesh, parameter.placements)

    @torch.no_grad()
    def add(self, parameter: Tensor, delta: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return super().add(parameter, delta)
        shard = self.shard(parameter)
        return DTensor.from_local(
            shard + self.shard_of_whole(parameter, delta.to(shard.device)),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def gather_named(self, named: NamedTensors, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        limit = self._bucket_bytes // 2  # the gathered bucket, and a reordered copy of one of its tensors
        if self._device.type == "cpu":
            limit = min(limit, _HOST_BUCKET_BYTES)

        def num_bytes(tensor: Tensor) -> int:
            return tensor.numel() * (dtype.itemsize if dtype else tensor.element_size())

        for bucket in buckets(named, num_bytes, limit, _fits_together):
            yield from _gather(bucket, dtype, self._device, self._replica)


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, without its autograd, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # to_local() takes twenty times as long


def rows_of(tensor: Tensor) -> Rows | None:
    """Returns this rank's rows of a DTensor that is sharded only along dim 0, else None."""
    if not isinstance(tensor, DTensor):
        return None
    sharded = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is Shard]
    num_replicated = sum(placement.is_replicate() for placement in tensor.placements)
    coordinate = tensor.device_mesh.get_coordinate()
    if len(sharded) != 1 or len(sharded) + num_replicated != tensor.device_mesh.ndim or coordinate is None:
        return None
    (axis,) = sharded
    if tensor.placements[axis] != Shard(0):
        return None
    length = tensor.shape[0]
    at_most = -(-length // tensor.device_mesh.size(axis))
    start = min(coordinate[axis] * at_most, length)
    stop = min(start + at_most, length)
    assert tensor.to_local().shape[0] == stop - start, (tensor.to_local().shape, start, stop)
    return Rows(start, stop, _is_first_holder(tensor.device_mesh, tensor.placements))


# ---- Shards and wholes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a tensor is cut: into equal parts by tensor parallelism, and each part into rows by FSDP.

    The last shards of a part have fewer rows than the first, or none.
    """

    num_shards: int
    shard: int  # of this rank
    num_parts: int = 1
    part: int = 0
    part_dim: int = 0

    def shape_of_part(self, whole: torch.Size) -> torch.Size:
        """Returns the shape of the parts into which tensor parallelism cuts a tensor of this shape."""
        sizes = list(whole)
        sizes[self.part_dim] //= self.num_parts
        return torch.Size(sizes)

    def num_rows(self, whole: torch.Size) -> int:
        """Returns the number of rows of the first shards, to which the others are padded."""
        return -(-self.shape_of_part(whole)[0] // self.num_shards)

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this rank's shard of a whole tensor, as a view."""
        part = whole.chunk(self.num_parts, dim=self.part_dim)[self.part]
        rows = self.num_rows(whole.shape)
        return part[rows * self.shard : rows * (self.shard + 1)]

    def offsets(self, whole: torch.Size) -> list[int]:
        """Returns the index at which this rank's shard begins in each dimension of the whole tensor."""
        part = self.shape_of_part(whole)
        starts = [0] * len(whole)
        starts[self.part_dim] = self.part * part[self.part_dim]
        starts[0] += min(self.num_rows(whole) * self.shard, part[0])
        return starts

    def join(self, shards: Tensor, whole: torch.Size) -> Tensor:
        """Returns the whole tensor, contiguous, from all ranks' padded shards, [num_shards x num_parts, elements]."""
        shape, rows = self.shape_of_part(whole), self.num_rows(whole)
        grid = shards.reshape(self.num_shards, self.num_parts, rows, *shape[1:]).movedim(1, 0)
        parts = grid.reshape(self.num_parts, self.num_shards * rows, *shape[1:])[:, : shape[0]]
        return parts[0].contiguous() if self.num_parts == 1 else torch.cat(parts.unbind(0), dim=self.part_dim)


@functools.lru_cache(maxsize=4096)
def span_of_shard(sharding: Sharding, whole: torch.Size) -> Span:
    """Returns the places of a shard's elements in the flattened whole tensor."""
    sizes = list(sharding.shape_of_part(whole))
    rows = sharding.num_rows(whole)
    sizes[0] = max(0, min(rows, sizes[0] - rows * sharding.shard))
    return span_of(whole, sizes, sharding.offsets(whole))


def sharding_of(tensor: DTensor) -> Sharding | None:
    """Returns how FSDP and tensor parallelism cut the tensor; None for any other way, which is left to torch."""
    return _sharding(tensor.device_mesh, tensor.placements)


@functools.lru_cache(maxsize=64)
def _sharding(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Sharding | None:
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    fields: dict[str, int] = {}
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim, size, rank = getattr(placement, "dim", None), mesh.size(axis), mesh.get_local_rank(axis)
        if dim is None or (names[axis] != TENSOR_AXIS and (dim != 0 or "num_shards" in fields)):
            return None
        if names[axis] == TENSOR_AXIS:
            fields |= {"num_parts": size, "part": rank, "part_dim": dim}
        else:
            fields |= {"num_shards": size, "shard": rank}
    return Sharding(**{"num_shards": 1, "shard": 0, **fields}) if fields else None


@functools.lru_cache(maxsize=64)
def _is_first_holder(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    if not (mesh.mesh == 0).any():  # another FSDP mesh: tensor parallelism does not cut this parameter
        return False
    replicated = [place.is_replicate() for place in placements]
    return not any(index for index, is_same in zip(mesh.get_coordinate() or (), replicated, strict=True) if is_same)


def _offsets(tensor: DTensor) -> list[int]:
    """Returns where this rank's shard begins in each dimension, for placements that sharding_of() leaves to torch."""
    sizes, starts = list(tensor.shape), [0] * tensor.dim()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            dim, count = placement.dim, -(-sizes[placement.dim] // tensor.device_mesh.size(axis))
            start = min(count * tensor.device_mesh.get_local_rank(axis), sizes[dim])
            starts[dim] += start
            sizes[dim] = min(count, sizes[dim] - start)
    return starts


# ---- Buckets -----------------------------------------------------------------------------------------------------


def _fits_together(first: Tensor, other: Tensor) -> bool:
    if not isinstance(first, DTensor) or not isinstance(other, DTensor):
        return type(first) is type(other)
    return (
        first.dtype == other.dtype and first.device_mesh == other.device_mesh and first.placements == other.placements
    )


def _gather(
    bucket: list[tuple[str, Tensor]], dtype: torch.dtype | None, device: torch.device, replica: ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    first = bucket[0][1]
    if not isinstance(first, DTensor):
        for name, tensor in bucket:
            yield name, as_sent(name, tensor, dtype).to(device)
        return
    sharding = sharding_of(first)
    if sharding is None or (sharding.num_parts > 1 and replica is None):
        for name, tensor in bucket:
            with torch.no_grad():
                whole: Tensor = cast(DTensor, tensor.to(dtype or tensor.dtype)).full_tensor()
            yield name, whole.to(device)
        return
    shards = [_padded_shard(tensor, sharding, dtype, device) for _, tensor in bucket]
    group = replica if sharding.num_parts > 1 else first.device_mesh.get_group(_sharded_axis(first))
    gathered = gather_flat(shards, sharding.num_shards * sharding.num_parts, group)
    start = 0
    for name, tensor in bucket:
        length = _padded_numel(tensor, sharding)
        yield name, sharding.join(gathered[:, start : start + length], tensor.shape)
        start += length


def gather_flat(shards: list[Tensor], num_ranks: int, group: ProcessGroup | None) -> Tensor:
    """Returns the concatenated shards of each rank, [num_ranks, elements]."""
    first = shards[0]
    gathered = first.new_empty(num_ranks, sum(map(len, shards)))
    if first.device.type != "cpu":
        all_gather_flat(gathered.view(-1), torch.cat(shards) if len(shards) > 1 else first, group=group)
        return gathered
    # Gloo gathers into memory that is new each time, and copies from there; a broadcast writes where it shall.
    torch.cat(shards, out=gathered[dist.get_rank(group)])
    parts = gathered.view(torch.uint8)
    sent = [dist.broadcast(part, group_src=rank, group=group, async_op=True) for rank, part in enumerate(parts)]
    for work in sent:
        assert work is not None
        work.wait()
    return gathered


def _sharded_axis(tensor: DTensor) -> int:
    return next(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())


def _padded_numel(tensor: Tensor, sharding: Sharding) -> int:
    return sharding.num_rows(tensor.shape) * sharding.shape_of_part(tensor.shape)[1:].numel()


def _padded_shard(tensor: Tensor, sharding: Sharding, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Returns this rank's values, [elements], padded to the number of rows on the first ranks."""
    shard = local(tensor).detach().to(device=device, dtype=dtype if tensor.is_floating_point() else None).reshape(-1)
    missing = _padded_numel(tensor, sharding) - shard.numel()
    return torch.cat([shard, shard.new_zeros(missing)]) if missing else shard
