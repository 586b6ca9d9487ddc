"""Gathers many sharded parameters with few collectives and bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from lightrl.comm import all_gather_flat


def gather_in_buckets(
    named: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None, device: torch.device, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor) in the order given; every rank must iterate to the end.

    bucket_bytes bounds the whole tensors held at a time; a larger tensor makes a bucket of its own.
    """
    bucket_bytes //= 2  # the gathered bucket, and the reordered copy of a tensor of it
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        num_bytes = tensor.numel() * (dtype.itemsize if dtype else tensor.element_size())
        if bucket and (size + num_bytes > bucket_bytes or not _fits_together(bucket[0][1], tensor)):
            yield from _gather(bucket, dtype, device)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield from _gather(bucket, dtype, device)


def _fits_together(first: Tensor, other: Tensor) -> bool:
    if not isinstance(first, DTensor) or not isinstance(other, DTensor):
        return type(first) is type(other)
    return (
        first.dtype == other.dtype and first.device_mesh == other.device_mesh and first.placements == other.placements
    )


def _gather(
    bucket: list[tuple[str, Tensor]], dtype: torch.dtype | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    first = bucket[0][1]
    if not isinstance(first, DTensor):
        for name, tensor in bucket:
            yield name, tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        return
    shard_axis = [axis for axis, placement in enumerate(first.placements) if placement == Shard(0)]
    if len(shard_axis) != 1:  # a layout other than plain dim-0 sharding: let torch work it out
        for name, tensor in bucket:
            whole: Tensor = cast(DTensor, tensor.to(dtype or tensor.dtype)).full_tensor()
            yield name, whole.to(device)
        return
    group = first.device_mesh.get_group(shard_axis[0])
    num_shards = dist.get_world_size(group)
    flat = torch.cat([_padded_rows(tensor, num_shards, dtype, device).reshape(-1) for _, tensor in bucket])
    gathered = flat.new_empty(num_shards * flat.numel())
    all_gather_flat(gathered, flat, group=group)
    gathered = gathered.view(num_shards, flat.numel())
    start = 0
    for name, tensor in bucket:
        rows = -(-tensor.shape[0] // num_shards)
        length = rows * (tensor.numel() // max(1, tensor.shape[0]))
        part = gathered[:, start : start + length].reshape(num_shards * rows, *tensor.shape[1:])
        start += length
        yield name, part[: tensor.shape[0]]


def _padded_rows(tensor: Tensor, num_shards: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """This rank's rows, padded to ceil(rows / shards): the last ranks hold fewer, or none."""
    assert isinstance(tensor, DTensor)
    shard = tensor.to_local().to(device=device, dtype=dtype if tensor.is_floating_point() else None)
    rows = -(-tensor.shape[0] // num_shards)
    missing = rows - shard.shape[0]
    return torch.cat([shard, shard.new_zeros((missing, *tensor.shape[1:]))]) if missing else shard
