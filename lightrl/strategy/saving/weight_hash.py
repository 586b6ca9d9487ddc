"""The hash of weights: one number for a model, whichever ranks held it and however many files it is saved in.

A row of a tensor is an entry of its first dimension; a scalar has one row. The digest of a tensor is the sum, modulo
2^256, of SHA-256 over the line "NAME DTYPE SHAPE", the index of the row as 8 bytes, and the bytes of the row (numbers
little end first). A sum has no order, so each rank adds up the rows it has. The hash of a model is the SHA-256 of one
line "NAME DTYPE SHAPE DIGEST" for each tensor, sorted. weights.sha256 holds the hash and, below it, these lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from lightrl.checkpoint import load_json, save_bytes

HASH_FILE = "weights.sha256"
_MODULUS = 1 << 256


class Rows(NamedTuple):
    """Some rows of a tensor, by name: those from `first` on of a tensor of `shape`."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    first: int = 0


def digest_of_rows(rows: Rows) -> int:
    """Returns what the rows add to their tensor's digest."""
    head, values = hashlib.sha256(f"{_described(rows)}\n".encode()), rows.tensor.detach().cpu().contiguous()
    num_rows = values.shape[0] if values.dim() else 1
    if not values.numel():
        return 0
    content = values.reshape(-1).view(torch.uint8).numpy().data
    size, total = len(content) // num_rows, 0
    for index in range(num_rows):
        digest = head.copy()
        digest.update((rows.first + index).to_bytes(8, "little"))
        digest.update(content[index * size : (index + 1) * size])
        total += int.from_bytes(digest.digest(), "little")
    return total % _MODULUS


def _described(rows: Rows) -> str:
    shape = "x".join(map(str, rows.shape)) or "scalar"
    return f"{rows.name} {str(rows.tensor.dtype).removeprefix('torch.')} {shape}"


def hash_text(parts: Iterable[tuple[str, int]]) -> str:
    """Returns the content of weights.sha256, from parts: (described tensor, digest of some of its rows)."""
    digests: dict[str, int] = {}
    for described, digest in parts:
        digests[described] = (digests.get(described, 0) + digest) % _MODULUS
    lines = "".join(f"{described} {digests[described]:064x}\n" for described in sorted(digests))
    return f"{hashlib.sha256(lines.encode()).hexdigest()}\n{lines}"


# ---- Writing ---------------------------------------------------------------------------------------------------------


def write_folder_hash(folder: Path, in_memory: Mapping[str, Tensor | None] | None = None) -> None:
    """Writes weights.sha256 beside all safetensors files of a Hugging Face folder.

    A tensor that is in memory under its name in the file is not read from the disk.
    """
    text = hash_text((_described(rows), digest_of_rows(rows)) for rows in _folder_rows(folder, in_memory or {}))
    save_bytes(folder / HASH_FILE, text.encode())


def write_state_hash(folder: Path) -> None:
    """Writes weights.sha256 of a checkpoint's folder, from the digests that the ranks wrote beside their rows."""
    save_bytes(folder / HASH_FILE, hash_text(_noted_parts(folder)).encode())


def _noted_parts(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.glob("model-rank*.json")):
        for name, entry in load_json(path).items():
            shape = "x".join(map(str, entry["shape"])) or "scalar"
            yield f"{name} {entry['dtype']} {shape}", int(entry["digest"], 16)


# ---- Reading ---------------------------------------------------------------------------------------------------------


def recompute(folder: Path) -> str:
    """Returns what weights.sha256 should hold, from the bytes of the files of a folder or a checkpoint."""
    rows = _state_rows(folder) if any(folder.glob("model-rank*.json")) else _folder_rows(folder, {})
    return hash_text((_described(part), digest_of_rows(part)) for part in rows)


def _folder_rows(folder: Path, in_memory: Mapping[str, Tensor | None]) -> Iterator[Rows]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no dictionary: it has no iteration of its own
                shape, known = tuple(opened.get_slice(name).get_shape()), in_memory.get(name)
                tensor = known if known is not None and known.shape == shape else opened.get_tensor(name)
                yield Rows(name, tensor, shape)


def _state_rows(folder: Path) -> Iterator[Rows]:
    for path in sorted(folder.glob("model-rank*.json")):
        for name, entry in load_json(path).items():
            with safe_open(folder / entry["file"], framework="pt") as opened:
                yield Rows(name, opened.get_tensor(name), tuple(entry["shape"]), entry.get("rows", [0])[0])
