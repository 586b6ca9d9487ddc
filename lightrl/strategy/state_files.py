"""Training state as safetensors of whole tensors under HF names, so that any strategy at any world size reads it.

Each rank gathers every tensor (a collective) but writes only its share, so no rank holds or writes the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightrl.checkpoint import load_json, save_json, save_tensors
from lightrl.comm import Comm

_FILE_BYTES = 2 << 30  # a file is written when it has gathered this much, which bounds the memory it takes


def write_tensors(directory: Path, kind: str, tensors: Iterable[tuple[str, Tensor]], comm: Comm) -> None:
    """Writes (name, whole tensor) pairs, which every rank must iterate; tensor i goes to the rank least loaded."""
    load = [0] * comm.world
    pending: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    pending_bytes = num_files = 0

    def flush() -> None:
        nonlocal pending, pending_bytes, num_files
        name = f"{kind}-rank{comm.rank:05d}-{num_files:05d}.safetensors"
        save_tensors(directory / name, pending)
        index.update(dict.fromkeys(pending, name))
        pending, pending_bytes, num_files = {}, 0, num_files + 1

    for name, tensor in tensors:
        writer = min(range(comm.world), key=load.__getitem__)
        size = tensor.numel() * tensor.element_size()
        load[writer] += size
        if writer == comm.rank:
            pending[name] = tensor.detach().to("cpu", copy=True)
            pending_bytes += size
            if pending_bytes >= _FILE_BYTES:
                flush()
    if pending:
        flush()
    save_json(directory / f"{kind}-rank{comm.rank:05d}.json", index)


class TensorReader:
    """Reads single tensors of what write_tensors wrote, at whatever world size that was."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory = directory
        self._files: dict[str, str] = {}
        for path in sorted(directory.glob(f"{kind}-rank*.json")):
            self._files.update(load_json(path))

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def keys_of(self, parameter_name: str) -> list[str]:
        """Of optimizer states: the keys of one parameter."""
        parts = (name.rpartition("/") for name in self._files)
        return sorted(key for name, _, key in parts if name == parameter_name)

    def __getitem__(self, name: str) -> Tensor:
        path = self._directory / self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}). Continue another step with --resume PATH.") from error
        return tensor


def optimizer_state_tensors(
    states: Iterable[tuple[str, dict[str, Any]]], gather: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(parameter name / state key, whole tensor) for every tensor state, in one order on all ranks."""
    for name, state in states:
        for key in sorted(state):
            if not torch.is_tensor(state[key]):
                raise ValueError(f"The optimizer's state {key!r} of {name} is no tensor, so it cannot be saved.")
            yield f"{name}/{key}", gather(state[key])
