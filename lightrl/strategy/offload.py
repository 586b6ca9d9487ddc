"""Moves the storages of live tensors to host memory and back in place: parameters, optimizers, views keep working."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class StorageOffloader:
    """Frees the device memory behind tensors and restores it bit for bit. Both calls are idempotent."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    @property
    def is_offloaded(self) -> bool:
        return bool(self._kept)

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Returns the bytes freed."""
        if self._kept:
            return 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in self._kept:  # tied weights and views share a storage
                continue
            if not storage.resizable():  # a mapped file, as a loaded model may be in host memory: not ours to free
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            host.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            self._kept[storage.data_ptr()] = (storage, host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        freed = sum(host.numel() for _, host in self._kept.values())
        for storage, _ in self._kept.values():
            storage.resize_(0)
        return freed

    @torch.no_grad()
    def restore(self) -> int:
        """Returns the bytes brought back."""
        for storage, host in self._kept.values():
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        restored = sum(host.numel() for _, host in self._kept.values())
        self._kept = {}
        return restored
