"""The files of a checkpoint: safetensors under Hugging Face names, which any strategy reads at any world size.

A rank writes the rows that it holds, and some of the tensors that all ranks have whole, so no rank holds, gathers or
writes the whole model. A TensorReader reads any rows of a tensor, whichever ranks wrote them. weights.sha256 holds a
hash of the weights that does not depend on the ranks that held them or on the number of files.
"""

from __future__ import annotations

import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from lightrl.checkpoint import load_json, save_bytes, save_json, save_tensors
from lightrl.comm import Comm
from lightrl.models.multimodal import copy_processor
from lightrl.strategy.layout.plain import Piece

HASH_FILE = "weights.sha256"
_MODULUS = 1 << 256
_FILE_BYTES = 2 << 30  # a file is written once it has this size, which bounds the memory it takes
_CHECKED_BYTES = 4 << 20  # have their own checksum, so that checking a few rows reads little more than them
_FURTHER_LAYERS = re.compile(r'"(num_nextn_predict_layers|mtp_num_hidden_layers|num_mtp_layers)": [1-9]\d*')
_NAME_OF_FURTHER_LAYER = re.compile("mtp|nextn|eh_proj")  # in the names of weights


@dataclass(eq=False)
class StateWriter:
    """Writes this rank's files of one checkpoint."""

    directory: Path
    comm: Comm
    error: OSError | None = None  # of the first file that could not be written; no more files are written then

    def add_tensors(self, kind: str, pieces: Iterable[Piece]) -> None:
        """Adds tensors of one kind; every rank must add the same names.

        A tensor that all ranks have whole is written by the rank with the fewest bytes of such tensors so far.
        """
        index: dict[str, dict[str, Any]] = {}
        for number, part in enumerate(_files(pieces if self.comm.world == 1 else self._own(pieces))):
            path = self.directory / f"{kind}-rank{self.comm.rank:05d}-{number:05d}.safetensors"
            self._do(partial(_save_with_checksums, path, part, index))
        self._do(partial(save_json, self.directory / f"{kind}-rank{self.comm.rank:05d}.json", index))

    def _own(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yields the pieces that this rank writes: its rows, and its share of the tensors that every rank has whole."""
        load = [0] * self.comm.world
        for piece in pieces:
            if piece.rows is None:
                writer = min(range(self.comm.world), key=load.__getitem__)
                load[writer] += piece.tensor.nbytes
                if writer == self.comm.rank:
                    yield piece
            elif piece.rows[0] < piece.rows[1]:  # otherwise it has no rows, or another replica writes them
                yield piece

    def add_object(self, name: str, value: Any) -> None:
        """Adds a file of plain values and tensors, as they are now."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self._do(lambda: save_bytes(self.directory / name, buffer.getvalue()))

    def _do(self, job: Callable[[], None]) -> None:
        try:
            if self.error is None:
                job()
        except OSError as error:  # raised later, where all ranks learn of it: now others are in a collective
            self.error = error


@dataclass(eq=False)
class DeferredWriter(StateWriter):
    """Writer that keeps copies in host memory; its `jobs` write the files later.

    The jobs use neither the model nor another rank, so a thread may run them.
    """

    jobs: list[Callable[[], None]] = field(default_factory=list)

    def _do(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)


def _files(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yields the pieces of one file at a time, copied to host memory."""
    part: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        part.append(piece._replace(tensor=piece.tensor.detach().to("cpu", copy=True)))
        num_bytes += piece.tensor.nbytes
        if num_bytes >= _FILE_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _save_with_checksums(path: Path, pieces: Sequence[Piece], index: dict[str, dict[str, Any]]) -> None:
    """Writes a file, and adds its contents to the index."""
    for piece in pieces:
        name, tensor = piece.name, piece.tensor
        row_bytes = tensor.nbytes // max(1, len(tensor)) if tensor.dim() else 0
        num_rows = max(1, _CHECKED_BYTES // max(1, row_bytes))
        checksums = {"crc_rows": num_rows, "crc32s": block_checksums(tensor, num_rows)}
        index[name] = {**_index_entry(piece), "file": path.name, **checksums}
        if path.name.startswith("model-"):  # the weights are also part of the checkpoint's hash
            rows = NamedRows(name, tensor, tuple(index[name]["shape"]), piece.rows[0] if piece.rows else 0)
            index[name]["digest"] = f"{digest_of_rows(rows):x}"
    save_tensors(path, {piece.name: piece.tensor for piece in pieces})


def block_checksums(tensor: Tensor, num_rows: int) -> list[int]:
    """Returns the CRC-32 of each block of rows; this takes little time compared with writing them."""
    blocks = (block.contiguous().unsqueeze(-1) for block in (tensor.split(num_rows) if tensor.dim() else [tensor]))
    return [zlib.crc32(block.view(torch.uint8).numpy().data) for block in blocks]


def _index_entry(piece: Piece) -> dict[str, Any]:
    rows = {} if piece.rows is None else {"shape": [piece.num_rows, *piece.tensor.shape[1:]], "rows": list(piece.rows)}
    return {"shape": list(piece.tensor.shape), "dtype": str(piece.tensor.dtype).removeprefix("torch."), **rows}


# ---- The hash of weights ---------------------------------------------------------------------------------------------
# A row of a tensor is an entry of its first dimension; a scalar has one row. The digest of a tensor is the sum, modulo
# 2^256, of SHA-256 over the line "NAME DTYPE SHAPE", the index of the row as 8 bytes, and the bytes of the row (numbers
# little end first). A sum has no order, so each rank adds up the rows it has. The hash of a model is the SHA-256 of one
# line "NAME DTYPE SHAPE DIGEST" for each tensor, sorted. weights.sha256 holds the hash and, below it, these lines.


class NamedRows(NamedTuple):
    """Some rows of a named tensor of `shape`, beginning with row `first`."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    first: int = 0


def digest_of_rows(rows: NamedRows) -> int:
    """Returns the rows' share in the digest of their tensor."""
    head = hashlib.sha256(f"{_described(rows.name, rows.tensor.dtype, rows.shape)}\n".encode())
    raw = torch.atleast_1d(rows.tensor.detach().cpu().contiguous()).unsqueeze(-1).flatten(1).view(torch.uint8).numpy()
    total = 0
    for index, row in enumerate(raw, start=rows.first):
        digest = head.copy()
        digest.update(index.to_bytes(8, "little"))
        digest.update(row)
        total += int.from_bytes(digest.digest(), "little")
    return total % _MODULUS


def _described(name: str, dtype: torch.dtype | str, shape: Iterable[int]) -> str:
    return f"{name} {str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape)) or 'scalar'}"


def hash_text(parts: Iterable[tuple[str, int]]) -> str:
    """Returns the content of weights.sha256, from parts: (described tensor, digest of some of its rows)."""
    digests: dict[str, int] = {}
    for described, digest in parts:
        digests[described] = (digests.get(described, 0) + digest) % _MODULUS
    lines = "".join(f"{described} {digests[described]:064x}\n" for described in sorted(digests))
    return f"{hashlib.sha256(lines.encode()).hexdigest()}\n{lines}"


def write_folder_hash(folder: Path, in_memory: Mapping[str, Tensor | None] | None = None) -> None:
    """Writes weights.sha256 beside a folder's safetensors files; reads the tensors that are not in memory."""
    save_bytes(folder / HASH_FILE, _hash_of(_folder_rows(folder, in_memory or {})).encode())
    with suppress(OSError):  # some file systems have no modes; safetensors gives its files 0600, whatever the umask
        for path in folder.glob("*.safetensors"):
            path.chmod((folder / HASH_FILE).stat().st_mode)


def complete_folder(model: Any, folder: Path, saved: Iterable[str]) -> None:
    """Adds the image processor to a saved model's folder, and corrects its config where layers were not saved."""
    if hasattr(getattr(model, "config", None), "vision_config"):
        copy_processor(model.name_or_path, folder)
    config = folder / "config.json"
    if config.exists() and _FURTHER_LAYERS.search(stated := config.read_text(encoding="utf-8")):
        _drop_absent_layers(config, stated, saved)


def _drop_absent_layers(config: Path, stated: str, saved: Iterable[str]) -> None:
    """Sets the number of layers that predict further tokens (MTP) to 0, unless their weights are among the saved names.

    Programs that read the number look for the weights, and transformers loads a model without them. transformers even
    states one such layer for a DeepSeek-V3 that has none.
    """
    if not any(map(_NAME_OF_FURTHER_LAYER.search, saved)):
        config.write_text(_FURTHER_LAYERS.sub(r'"\1": 0', stated), encoding="utf-8")


def write_state_hash(folder: Path) -> None:
    """Writes weights.sha256 of a checkpoint's folder, from the digests that the ranks wrote beside their rows."""
    save_bytes(folder / HASH_FILE, hash_text(_noted_parts(folder)).encode())


def _noted_parts(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.glob("model-rank*.json")):
        for name, entry in load_json(path).items():
            yield _described(name, entry["dtype"], entry["shape"]), int(entry["digest"], 16)


def recompute(folder: Path) -> str:
    """Computes the content of weights.sha256 from the files of a folder or a checkpoint."""
    rows = _state_rows(folder) if any(folder.glob("model-rank*.json")) else _folder_rows(folder, {})
    return _hash_of(rows)


def _hash_of(parts: Iterable[NamedRows]) -> str:
    return hash_text((_described(part.name, part.tensor.dtype, part.shape), digest_of_rows(part)) for part in parts)


def _folder_rows(folder: Path, in_memory: Mapping[str, Tensor | None]) -> Iterator[NamedRows]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no dictionary: it has no iteration of its own
                shape, known = tuple(opened.get_slice(name).get_shape()), in_memory.get(name)
                tensor = known if known is not None and known.shape == shape else opened.get_tensor(name)
                yield NamedRows(name, tensor, shape)


def _state_rows(folder: Path) -> Iterator[NamedRows]:
    for path in sorted(folder.glob("model-rank*.json")):
        for name, entry in load_json(path).items():
            with safe_open(folder / entry["file"], framework="pt") as opened:
                yield NamedRows(name, opened.get_tensor(name), tuple(entry["shape"]), entry.get("rows", [0])[0])
