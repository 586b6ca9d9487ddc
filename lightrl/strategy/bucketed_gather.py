"""Gathers many sharded parameters with few collectives and bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightrl.comm import all_gather_flat
from lightrl.strategy.sharding import Sharding, sharding_of


def gather_in_buckets(
    named: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    bucket_bytes: int,
    replica: ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor) in the order given; every rank must iterate to the end.

    bucket_bytes bounds the whole tensors held at a time; a larger tensor makes a bucket of its own.
    replica: the ranks that hold one whole model between them, shard by shard and in each the parts of tensor
    parallelism; needed for tensors that are cut into such parts.
    """
    bucket_bytes //= 2  # the gathered bucket, and the reordered copy of a tensor of it
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        num_bytes = tensor.numel() * (dtype.itemsize if dtype else tensor.element_size())
        if bucket and (size + num_bytes > bucket_bytes or not _fits_together(bucket[0][1], tensor)):
            yield from _gather(bucket, dtype, device, replica)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield from _gather(bucket, dtype, device, replica)


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
            yield name, tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        return
    sharding = sharding_of(first)
    if sharding is None or (sharding.num_parts > 1 and replica is None):
        for name, tensor in bucket:
            whole: Tensor = cast(DTensor, tensor.to(dtype or tensor.dtype)).full_tensor()
            yield name, whole.to(device)
        return
    flat = torch.cat([_padded_shard(tensor, sharding, dtype, device) for _, tensor in bucket])
    num_ranks = sharding.num_shards * sharding.num_parts
    gathered = flat.new_empty(num_ranks * flat.numel())
    group = replica if sharding.num_parts > 1 else first.device_mesh.get_group(_sharded_axis(first))
    all_gather_flat(gathered, flat, group=group)
    gathered = gathered.view(num_ranks, flat.numel())
    start = 0
    for name, tensor in bucket:
        length = _padded_numel(tensor, sharding)
        yield name, sharding.joined(gathered[:, start : start + length], tensor.shape)
        start += length


def _sharded_axis(tensor: DTensor) -> int:
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return axes[0] if axes else tensor.device_mesh.ndim - 1


def _padded_numel(tensor: Tensor, sharding: Sharding) -> int:
    return sharding.num_rows(tensor.shape) * sharding.shape_of_part(tensor.shape)[1:].numel()


def _padded_shard(tensor: Tensor, sharding: Sharding, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """This rank's values, [elements], padded to as many rows as the first ranks hold."""
    assert isinstance(tensor, DTensor)
    shard = tensor.to_local().to(device=device, dtype=dtype if tensor.is_floating_point() else None).reshape(-1)
    missing = _padded_numel(tensor, sharding) - shard.numel()
    return torch.cat([shard, shard.new_zeros(missing)]) if missing else shard
