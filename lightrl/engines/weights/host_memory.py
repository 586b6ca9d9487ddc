"""The memory of an engine's weights: freed and taken again, or mapped by all ranks of a host to be there only once."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from lightrl.comm import Comm

_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every element's size
_MARK = 16  # random bytes at the end, which show that two ranks map the same memory


@torch.no_grad()
def move_together(parameters: Mapping[str, Tensor], comm: Comm) -> bool:
    """Moves parameters, which have the same values on all ranks, into memory that all ranks map; a collective.

    They keep their layout, and those that share a storage stay side by side. Returns False and moves nothing if the
    ranks are on several hosts or lay out their parameters in different ways.
    """
    sizes: dict[int, int] = {}  # bytes of each storage, even if it is freed while the engine sleeps
    for item in parameters.values():
        storage = _storage_of(item)
        sizes[storage] = max(sizes.get(storage, 0), _end(item))
    starts, num_bytes = {}, 0
    for storage, size in sizes.items():
        starts[storage], num_bytes = num_bytes, num_bytes + -(-size // _ALIGNMENT) * _ALIGNMENT
    places = [
        (name, item.dtype, tuple(item.shape), item.stride(), starts[_storage_of(item)] // item.itemsize + offset)
        for name, item in parameters.items()
        for offset in (item.storage_offset(),)
    ]
    are_alike = len(set(comm.all_gather_object(tuple(places)))) == 1
    memory = map_together(comm, num_bytes) if are_alike else None
    if memory is None:
        return False
    for name, dtype, shape, stride, offset in places:
        place = memory.view(dtype).as_strided(shape, stride, offset)
        if comm.is_main and parameters[name].untyped_storage().nbytes():  # 0: freed while the engine sleeps
            place.copy_(parameters[name])
        parameters[name].data = place
    comm.barrier()  # before it, values may be missing
    return True


def move_apart(parameters: Iterable[Tensor]) -> bool:
    """Gives parameters in mapped memory memory of their own, without their values.

    Returns whether there were any. Those that share a storage stay side by side.
    """
    mapped = [item for item in parameters if is_mapped(item)]
    own: dict[int, Tensor] = {}
    for item in mapped:
        shared = item.untyped_storage()
        memory = own.setdefault(shared._cdata, torch.empty(shared.nbytes(), dtype=torch.uint8))
        item.data = memory.view(item.dtype).as_strided(item.shape, item.stride(), item.storage_offset())
    return bool(mapped)


def drop_weights(model: nn.Module, follow: Callable[[], None] | None = None) -> list[tuple[torch.UntypedStorage, int]]:
    """Frees the memory of all parameters; resizing each storage back to its bytes makes room for new values.

    follow: is called if parameters left memory that other ranks still read, to let go of it.
    """
    if move_apart(model.parameters()) and follow is not None:
        follow()
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage() for item in model.parameters()}
    dropped = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in dropped:
        storage.resize_(0)
    return dropped


def is_mapped(parameter: Tensor) -> bool:
    """Returns whether a parameter lies in mapped memory: that of several ranks, or that of a file."""
    return not parameter.untyped_storage().resizable()


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _end(tensor: Tensor) -> int:
    """Returns the offset at which a tensor ends in its storage, in bytes."""
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.itemsize


# ---- The memory --------------------------------------------------------------------------------------------------


def map_together(comm: Comm, num_bytes: int) -> Tensor | None:
    """Returns the same new memory on every rank, [num_bytes] uint8; None on all if one cannot map it; a collective.

    It is no file in any folder, so nothing is left behind when the ranks end, however they end, and a small /dev/shm,
    as containers have, does not limit it.
    """
    descriptor = _new_memory(num_bytes + _MARK) if comm.is_main else None
    try:
        process, number, mark = comm.broadcast_object((os.getpid(), descriptor, secrets.token_bytes(_MARK)))
        memory = None if number is None else _mapped(f"/proc/{process}/fd/{number}", num_bytes + _MARK)
        if comm.is_main and memory is not None:
            memory[num_bytes:] = torch.tensor(list(mark), dtype=torch.uint8)
        comm.barrier()  # before it, the mark may be missing
        is_same = memory is not None and bytes(memory[num_bytes:].tolist()) == mark
        return memory[:num_bytes] if comm.agree(is_same) and memory is not None else None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _new_memory(size: int) -> int | None:
    """Returns a descriptor of memory of this size; None if the system gives none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("lightrl-weights")
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, size)
    except OSError:  # beyond the limit of `ulimit -f`
        os.close(descriptor)
        return None
    return descriptor


def _mapped(path: str, size: int) -> Tensor | None:
    """Maps the memory at a path; None if this rank does not reach it, or it has another size."""
    try:
        # On another host the path may be that of another process's file, which is left alone.
        if os.stat(path).st_size != size:
            return None
        with open(path, "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError:
        return None
