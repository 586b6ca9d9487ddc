"""Reads the files of a checkpoint: any rows of a tensor, whichever ranks wrote them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals, safe_globals

from lightrl.checkpoint import load_json
from lightrl.strategy.saving.state_files import block_checksums


class _Part(NamedTuple):
    start: int
    stop: int
    file: str
    crc_rows: int  # rows per block; the last may have fewer
    crc32s: list[int]  # one per block; empty in an older checkpoint


class TensorReader:
    """Reads single tensors, or some of their rows, whatever the world size that wrote them."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory = directory
        self._shapes: dict[str, torch.Size] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._keys: dict[str, list[str]] = {}
        for path in sorted(directory.glob(f"{kind}-rank*.json")):
            try:
                for name, entry in load_json(path).items():
                    self._add(name, entry)
            except (AttributeError, KeyError, TypeError) as error:
                raise _damaged(path, error) from error
        for name in sorted(self._shapes):
            parameter, _, key = name.rpartition("/")
            self._keys.setdefault(parameter, []).append(key)
        for parts in self._parts.values():
            parts.sort()

    def _add(self, name: str, entry: dict[str, Any]) -> None:
        shape = torch.Size(entry["shape"])
        self._shapes[name], self._dtypes[name] = shape, getattr(torch, entry["dtype"])
        start, stop = entry.get("rows", (0, shape[0] if shape else 1))
        part = _Part(start, stop, entry["file"], entry.get("crc_rows", 1), entry.get("crc32s", []))
        self._parts.setdefault(name, []).append(part)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._shapes)

    def shape_of(self, name: str) -> torch.Size:
        """Returns the shape of a whole tensor."""
        return self._shapes[name]

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the type of a tensor."""
        return self._dtypes[name]

    def keys_of(self, parameter_name: str) -> list[str]:
        """Returns the keys of a parameter's optimizer states."""
        return self._keys.get(parameter_name, [])

    def __getitem__(self, name: str) -> Tensor:
        """Reads a whole tensor."""
        shape = self._shapes[name]
        return self.rows(name, 0, shape[0] if shape else 1)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Reads rows [start, stop) of dim 0; a scalar has one row."""
        shape = self._shapes[name]
        parts: list[Tensor] = []
        row = start
        for part in self._parts[name]:
            last = min(stop, part.stop)
            if part.start <= row < last:
                parts.append(self._read(part, name, row, last, whole=not shape))
                row = last
        if start < stop and row != stop:
            raise ValueError(f"{self._directory} lacks rows {row} to {stop} of {name}. Continue another step.")
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, *shape[1:], dtype=self._dtypes[name])

    def _read(self, part: _Part, name: str, first: int, last: int, *, whole: bool) -> Tensor:
        """Reads the blocks that hold the rows and checks each."""
        path, step = self._directory / part.file, part.crc_rows
        begin, end = first - part.start, last - part.start
        block = begin // step
        low, high = block * step, min(-(-end // step) * step, part.stop - part.start)
        try:
            with safe_open(path, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name) if whole else opened.get_slice(name)[low:high]
        except SafetensorError as error:
            raise _damaged(path, error) from error
        if part.crc32s:
            found = block_checksums(tensor, step)
            if found != part.crc32s[block : block + len(found)]:
                raise _damaged(path, f"a checksum of {name} is wrong")
        return tensor if whole else tensor[begin - low : end - low]


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(f"{path} is damaged ({reason}). Continue another step with --resume PATH.")


def load_object(path: Path) -> Any:
    """Reads an object that add_object wrote; raises ValueError for anything else."""
    try:
        return load_without_code(path)
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise _damaged(path, " ".join(str(error).split())[:200]) from error


def load_without_code(file: Path | BinaryIO) -> Any:
    """Reads a file of torch.save if that runs only torch's code, whatever other packages have declared safe.

    Megatron, for example, declares paths and namespaces safe for the whole process when it is imported. What a
    checkpoint may hold would then depend on what else the program imports.
    """
    declared = get_safe_globals()
    clear_safe_globals()
    try:
        with safe_globals([item for item in declared if _is_of_torch(item)]):
            return torch.load(file, weights_only=True, map_location="cpu")
    finally:
        add_safe_globals(declared)


def _is_of_torch(declared: Any) -> bool:
    """Returns whether torch defines an object that is declared safe; some are declared as (object, name)."""
    thing = declared[0] if isinstance(declared, tuple) else declared
    return str(getattr(thing, "__module__", "")).split(".")[0] == "torch"
