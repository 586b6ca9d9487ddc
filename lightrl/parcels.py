"""Exchanges between ranks of data whose sizes differ: pickled objects, and tensors of unequal length."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
# torch 2.13 renamed it, and warns at every call of the old name.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ROOM = 4096  # bytes of an object that travel with its size: more than most objects of a step have


def gather_objects(item: T, group: dist.ProcessGroup | None) -> list[T]:
    """Returns the items of all ranks of a gloo group, using one collective, or two if an item is large."""
    if group is None:  # somebody else made the world, and it may have no back end but NCCL
        items: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(items, item)
        return items
    parcel = pickle.dumps(item)
    rows = _gather_bytes(len(parcel).to_bytes(8, "little") + parcel[:_ROOM], 8 + _ROOM, group)
    largest = max(int.from_bytes(row[:8], "little") for row in rows)
    parcels = [row[8:] for row in rows] if largest <= _ROOM else _gather_bytes(parcel, largest, group)
    # The bytes come from our own ranks over our own process group, never from a file. Unpickling ignores the padding.
    return [pickle.loads(parcel) for parcel in parcels]


def _gather_bytes(content: bytes, length: int, group: dist.ProcessGroup) -> list[bytes]:
    own = torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8)
    gathered = own.new_empty(dist.get_world_size(group) * length)
    all_gather_flat(gathered, own, group=group)
    return [row.numpy().tobytes() for row in gathered.split(length)]


def exchange_objects(outgoing: Sequence[Sequence[T]], group: dist.ProcessGroup | None) -> list[T]:
    """Sends outgoing[r] to rank r; returns what the ranks sent here, in rank order."""
    parcels = [pickle.dumps(list(items)) for items in outgoing]
    sizes = torch.tensor([len(parcel) for parcel in parcels])
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes, group=group)
    payload = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8)
    received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, payload, incoming.tolist(), sizes.tolist(), group=group)
    return [item for part in received.split(incoming.tolist()) for item in pickle.loads(part.numpy().tobytes())]


def gather_rows(tensor: Tensor, group: dist.ProcessGroup | None, control: dist.ProcessGroup | None) -> Tensor:
    """Concatenates the ranks' tensors along dim 0, after comparing their types and shapes over the control group."""
    kinds = gather_objects((tensor.dtype, *tensor.shape), control)
    if len({(kind[0], kind[2:]) for kind in kinds}) > 1:
        raise ValueError(_describe_unequal(kinds))
    lengths = [kind[1] for kind in kinds]
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    gathered = padded.new_empty((len(lengths) * max(lengths), *tensor.shape[1:]))
    all_gather_flat(gathered, padded, group=group)
    chunks = gathered.split(max(lengths)) if max(lengths) else [padded] * len(lengths)
    return torch.cat([chunk[:length] for chunk, length in zip(chunks, lengths, strict=True)])


def _describe_unequal(kinds: Sequence[tuple[Any, ...]]) -> str:
    given = "; ".join(f"rank {rank}: {kind[0]} {list(kind[1:])}" for rank, kind in enumerate(kinds))
    return (
        "all_gather concatenates along the first dimension, so types and all other dimensions must be equal on all "
        f"ranks. Given: {given}. Pad the tensors to the same width first."
    )
