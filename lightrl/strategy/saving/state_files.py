"""The files of a checkpoint: safetensors under Hugging Face names, which any strategy reads at any world size.

A rank writes the rows that it holds, and some of the tensors that all ranks have whole, so no rank holds, gathers or
writes the whole model. A reader takes any rows of a tensor, whichever ranks wrote them.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightrl.checkpoint import load_json, save_bytes, save_json, save_tensors
from lightrl.comm import Comm
from lightrl.strategy.saving.weight_hash import Rows, digest_of_rows

_FILE_BYTES = 2 << 30  # a file is written when it has gathered this much, which bounds the memory it takes


_CHECKED_BYTES = 4 << 20  # have a checksum of their own, so that a reader of some rows reads little more to check them


class Piece(NamedTuple):
    """The part of a tensor that a rank can write: some rows, or the whole, which every rank then has."""

    name: str
    tensor: Tensor
    rows: tuple[int, int] | None = None  # [first, last) of dim 0; None: the whole tensor
    num_rows: int = 0  # of the whole tensor, where rows are given


class StateWriter:
    """Writes this rank's files of one checkpoint, or keeps copies in host memory to write them later.

    `jobs` then writes the files; it uses neither the model nor another rank, so a thread may run it.
    """

    def __init__(self, directory: Path, comm: Comm, *, deferred: bool = False) -> None:
        self._directory = directory
        self._comm = comm
        self._deferred = deferred
        self.jobs: list[Callable[[], None]] = []
        self.error: OSError | None = None  # of the first file that could not be written; no file follows it

    def add_tensors(self, kind: str, pieces: Iterable[Piece]) -> None:
        """Adds tensors of one kind; every rank must add the same names.

        A whole tensor is written by the rank that has the fewest bytes of whole tensors so far.
        """
        load = [0] * self._comm.world
        pending: dict[str, Tensor] = {}
        index: dict[str, dict[str, Any]] = {}
        pending_bytes = num_files = 0

        def flush() -> None:
            nonlocal pending, pending_bytes, num_files
            name = f"{kind}-rank{self._comm.rank:05d}-{num_files:05d}.safetensors"
            tensors, path = pending, self._directory / name
            index.update({key: {**index[key], "file": name} for key in tensors})
            self._do(lambda: _save_with_checksums(path, tensors, index))
            pending, pending_bytes, num_files = {}, 0, num_files + 1

        for piece in pieces:
            if piece.rows is None:
                writer = min(range(self._comm.world), key=load.__getitem__)
                load[writer] += piece.tensor.nbytes
                if writer != self._comm.rank:
                    continue
            elif piece.rows[0] == piece.rows[1]:
                continue  # fewer rows than ranks, or another replica writes them
            pending[piece.name] = piece.tensor.detach().to("cpu", copy=True)
            index[piece.name] = _index_entry(piece)
            pending_bytes += piece.tensor.nbytes
            if pending_bytes >= _FILE_BYTES:
                flush()
        if pending:
            flush()
        path = self._directory / f"{kind}-rank{self._comm.rank:05d}.json"
        self._do(lambda: save_json(path, index))

    def add_object(self, name: str, value: Any) -> None:
        """Adds a file of plain values and tensors, as they are now."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self._do(lambda: save_bytes(self._directory / name, buffer.getvalue()))

    def _do(self, job: Callable[[], None]) -> None:
        if self._deferred:
            self.jobs.append(job)
        elif self.error is None:
            try:
                job()
            except OSError as error:  # raised later, where all ranks hear of it: others are in a collective
                self.error = error


def _save_with_checksums(path: Path, tensors: dict[str, Tensor], index: dict[str, dict[str, Any]]) -> None:
    for name, tensor in tensors.items():
        row_bytes = tensor.nbytes // max(1, len(tensor)) if tensor.dim() else 0
        num_rows = max(1, _CHECKED_BYTES // max(1, row_bytes))
        index[name] |= {"crc_rows": num_rows, "crc32s": block_checksums(tensor, num_rows)}
        if path.name.startswith("model-"):  # the weights also count for the hash of the checkpoint
            rows = Rows(name, tensor, tuple(index[name]["shape"]), index[name].get("rows", [0])[0])
            index[name]["digest"] = f"{digest_of_rows(rows):x}"
    save_tensors(path, tensors)


def block_checksums(tensor: Tensor, num_rows: int) -> list[int]:
    """Returns the CRC-32 of each block of rows, in a time that is short beside that of writing them."""
    blocks = tensor.split(num_rows) if tensor.dim() else [tensor]
    return [zlib.crc32(block.contiguous().reshape(-1).view(torch.uint8).numpy().data) for block in blocks]


def _index_entry(piece: Piece) -> dict[str, Any]:
    shape, dtype = list(piece.tensor.shape), str(piece.tensor.dtype).removeprefix("torch.")
    if piece.rows is None:
        return {"shape": shape, "dtype": dtype}
    return {"shape": [piece.num_rows, *shape[1:]], "dtype": dtype, "rows": list(piece.rows)}


class _Part(NamedTuple):
    start: int
    stop: int
    file: str
    crc_rows: int  # rows of a block; the last may have fewer
    crc32s: list[int]  # of each block; empty in an older checkpoint


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
    """Reads what add_object wrote; raises ValueError for anything else."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise _damaged(path, " ".join(str(error).split())[:200]) from error
