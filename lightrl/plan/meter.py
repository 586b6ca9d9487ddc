"""Counts the bytes of the tensors that a model makes without making them: torch's fake tensors have only sizes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """Adds up the storages that operations make, for as long as they live."""

    def __init__(self, known: list[Tensor]) -> None:
        """Takes the `known` tensors, which are not counted and neither are views of them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._bytes: dict[int, int] = {}  # by the address of torch's object
        self._uncounted = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation and counts the tensors that it returns."""
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, Tensor):
                self._see(item.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes or key in self._uncounted:
            return
        self._bytes[key] = storage.nbytes()
        self.live += self._bytes[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._bytes.pop(key, 0)
