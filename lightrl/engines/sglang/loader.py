"""Weights on their way into SGLang's scheduler processes: how a bucket is packed, loaded, and read back.

load_bucket runs in the schedulers, which SGLang tells to call it by name. It must not raise, since an error there ends
the scheduler and with it the run: what is wrong is written to a report, which the engine's owner reads.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LOADER = f"{__name__}.load_bucket"
_NUM_SAMPLES = 32  # values compared of each tensor
_STRIDE = 2_654_435_761  # prime, so that the samples meet every row and column of a matrix
_ALIGNMENT = 16  # bytes: a view of a wider type must begin at a multiple of its size
_READABLE = (torch.float32, torch.bfloat16, torch.float16)
_FUSED: tuple[
    tuple[str, str, int | str], ...
] = (  # the last name before .weight, that of SGLang's fused layer, the piece of it
    ("q_proj", "qkv_proj", "q"),
    ("k_proj", "qkv_proj", "k"),
    ("v_proj", "qkv_proj", "v"),
    ("gate_proj", "gate_up_proj", 0),
    ("up_proj", "gate_up_proj", 1),
    ("qkv", "qkv_proj", "qkv"),
)
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_PIECE_OF_EXPERT = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": None, "w2": None}


def sample_places(numel: int) -> list[int]:
    """Flat places of the values that are compared; the same wherever they are asked for."""
    return sorted({place * _STRIDE % numel for place in range(min(numel, _NUM_SAMPLES))})


def sample_values(tensor: Tensor) -> list[float]:
    """The values at sample_places; exact, since float64 holds every value of a narrower type."""
    places = torch.tensor(sample_places(tensor.numel()), device=tensor.device)
    values: list[float] = tensor.detach()[torch.unravel_index(places, tensor.shape)].double().tolist()
    return values


# ---- The trainer's side


@dataclass(slots=True)
class Bucket:
    """Tensors to be sent together, with the values that they are known by."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.tensors.append((name, tensor.detach()))
        self.num_bytes += _padded(tensor.numel() * tensor.element_size())

    def pack(self, *, report: str, is_first: bool, is_last: bool, device: torch.device) -> list[tuple[str, Tensor]]:
        """Two byte tensors: all the values, and as JSON what they are. Frees the tensors as they are copied."""
        flat = torch.empty(max(self.num_bytes, _ALIGNMENT), dtype=torch.uint8, device=device)
        described: list[dict[str, Any]] = []
        start = 0
        for name, tensor in self.tensors:
            size = tensor.numel() * tensor.element_size()
            flat[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            values = sample_values(tensor)
            described.append(
                {"name": name, "dtype": dtype, "shape": list(tensor.shape), "start": start, "values": values}
            )
            start += _padded(size)
        self.tensors, self.num_bytes = [], 0
        head = {"report": report, "is_first": is_first, "is_last": is_last, "tensors": described}
        # On the values' device, so that one kind of handle carries both to another process.
        written = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8).to(device)
        return [("values", flat), ("head", written)]


def read_reports(folder: Path, count: int) -> tuple[list[str], list[str]]:
    """What the schedulers found, (problems, names that they cannot read back), and removes their files."""
    problems: dict[str, None] = {}
    unread: dict[str, None] = {}
    files = sorted(folder.glob("*.json"))
    for file in files:
        found = json.loads(file.read_text())
        problems |= dict.fromkeys(found["problems"])
        unread |= dict.fromkeys(found["unread"])
        file.unlink()
    if len(files) != count:
        problems[f"{len(files)} of {count} schedulers reported that they loaded the weights"] = None
    return list(problems), list(unread)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# ---- The scheduler's side


@dataclass(slots=True)
class _Sync:
    """What came in the buckets so far."""

    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # that are in the engine, where it is not known how to find them
    problems: list[str] = field(default_factory=list)


_sync = _Sync()


def load_bucket(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Loads what Bucket.pack made; after the last bucket reads everything back and writes the report."""
    global _sync
    parts = dict(named_tensors)
    head = json.loads(parts["head"].cpu().numpy().tobytes())
    if head["is_first"]:
        _sync = _Sync()
    try:
        _load(model, _unpack(parts["values"], head["tensors"]))
        if head["is_last"]:
            _read_back(model)
    except Exception as error:
        _sync.problems.append(f"{type(error).__name__}: {error}")
    if head["is_last"]:
        _write_report(model, Path(head["report"]))


def _unpack(flat: Tensor, described: Sequence[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    tensors = []
    for item in described:
        dtype: torch.dtype = getattr(torch, item["dtype"])
        shape = torch.Size(item["shape"])
        size = shape.numel() * dtype.itemsize
        tensors.append((item["name"], flat[item["start"] : item["start"] + size].view(dtype).view(shape)))
        _sync.given[item["name"]] = item
    return tensors


def _load(model: Any, tensors: list[tuple[str, Tensor]]) -> None:
    places = Places(model)
    try:
        model.load_weights(list(tensors))
    except Exception:  # all at once names no culprit
        _load_one_by_one(model, tensors)
    for name, tensor in tensors:
        if not places.find(name) and _is_written(model, name, tensor):
            _sync.written.add(name)


def _load_one_by_one(model: Any, tensors: list[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        try:
            model.load_weights([(name, tensor)])
        except Exception as error:
            _sync.problems.append(f"{name} does not fit: {type(error).__name__} {str(error).partition(chr(10))[0]}")


def _read_back(model: nn.Module) -> None:
    places, rank = Places(model), _tp_rank()
    failed = {problem.split(" ", 1)[0] for problem in _sync.problems}
    for name, item in _sync.given.items():
        if name in failed:
            continue
        place = places.find(name)
        if place is None:
            if name not in _sync.written:
                _sync.problems.append(f"{name} is no parameter of {type(model).__name__} in SGLang")
        elif not is_held(place, item, rank):
            _sync.problems.append(f"{name} is not held as it was given")
        elif place.parameter.dtype not in _READABLE:
            _sync.written.add(name)


def _write_report(model: nn.Module, folder: Path) -> None:
    file = folder / f"{os.getpid()}.json"
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps({"problems": _sync.problems, "unread": sorted(_sync.written)}))
    unfinished.rename(file)


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


# ---- Where a tensor lies


@dataclass(frozen=True, slots=True)
class Place:
    """The parameter of the engine that holds a tensor of the checkpoint, and which piece of it."""

    module: nn.Module
    parameter: Tensor
    piece: int | str | None = None  # of a fused layer; None is all of it
    expert: int | None = None


class Places:
    """Finds the engine's parameter for a name of the checkpoint.

    Prefixes differ ("model.language_model.layers.0.x" may be "model.layers.0.x"), so a name is known by its longest
    ending that belongs to one parameter only.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._by_ending: dict[str, list[str]] = {}
        for name in self._parameters:
            parts = name.split(".")
            for start in range(len(parts) - 1):
                self._by_ending.setdefault(".".join(parts[start:]), []).append(name)

    def find(self, name: str) -> Place | None:
        expert = _EXPERT.match(name)
        if expert:
            prefix, number, last = expert.groups()
            piece = _PIECE_OF_EXPERT[last]
            weight = f"{prefix}.w2_weight" if piece is None else f"{prefix}.w13_weight"
            return self._place(weight, piece, int(number)) or self._place(name)
        found = self._place(name)
        *path, last, kind = ["", *name.split(".")]
        for own, fused, part in _FUSED:
            if found is None and last == own:
                found = self._place(".".join([*path, fused, kind]).lstrip("."), part)
        return found

    def _place(self, name: str, piece: int | str | None = None, expert: int | None = None) -> Place | None:
        parts = name.split(".")
        if name in self._parameters:
            return self._make(name, piece, expert)
        for start in range(1, len(parts) - 1):
            same = self._by_ending.get(".".join(parts[start:]), [])
            if len(same) > 1:
                return None
            if same:
                return self._make(same[0], piece, expert)
        return None

    def _make(self, name: str, piece: int | str | None, expert: int | None) -> Place:
        return Place(self._modules[name.rpartition(".")[0]], self._parameters[name], piece, expert)


def is_held(place: Place, item: dict[str, Any], rank: int) -> bool:
    """Whether the sampled values that belong to this tensor-parallel rank are there, to the bit; True of none."""
    shape, given = torch.Size(item["shape"]), torch.tensor(item["values"], dtype=torch.float64)
    held = place.parameter
    if held.dtype not in _READABLE:
        return True
    if place.expert is not None:
        local = place.expert - getattr(place.module, "moe_ep_rank", 0) * held.shape[0]
        if not 0 <= local < held.shape[0]:
            return True
        held, rank = held[local], getattr(place.module, "moe_tp_rank", rank)
    if _equal(held, shape, given, place, rank):
        return True
    is_transposed = place.piece is None and held.dim() == 2 and held.shape == shape[::-1]
    return is_transposed and _equal(held.t(), shape, given, place, rank)


def _equal(held: Tensor, shape: torch.Size, given: Tensor, place: Place, rank: int) -> bool:
    """held and the tensor given are looked at as matrices of shape[0] rows."""
    places = torch.tensor(sample_places(shape.numel()))
    num_columns = shape.numel() // shape[0]
    matrix = held.reshape(held.shape[0], -1)
    rows = _local_rows(place, shape[0], matrix.shape[0], places // num_columns, rank)
    columns = places % num_columns
    if matrix.shape[1] != num_columns:  # a layer that is split along its input
        columns = columns - rank * matrix.shape[1]
    is_here = (rows >= 0) & (columns >= 0) & (columns < matrix.shape[1])
    ours = matrix[rows[is_here].to(held.device), columns[is_here].to(held.device)].cpu()
    return torch.allclose(ours.double(), given[is_here].to(held.dtype).double(), rtol=0, atol=0, equal_nan=True)


def _local_rows(place: Place, num_rows: int, num_held: int, rows: Tensor, rank: int) -> Tensor:
    """Row of the engine's parameter for each row of the tensor; -1 where another rank has it."""
    module: Any = place.module
    if place.piece in ("q", "k", "v"):
        return _rows_of_attention(module, str(place.piece), rows, rank)
    if place.piece == "qkv":
        return _rows_of_whole_attention(module, num_rows, rows, rank)
    if isinstance(place.piece, int):  # gate above up
        half = num_held // 2
        order = 1 - place.piece if _has_up_first(module) else place.piece
        return _shifted(rows, rank * half if half != num_rows else 0, half, order * half)
    indices = getattr(module, "shard_indices", None)
    if indices is not None:  # a vocabulary, padded
        start = int(indices.org_vocab_start_index)
        return _shifted(rows, start, int(indices.org_vocab_end_index) - start, 0)
    return _shifted(rows, 0 if num_held == num_rows else rank * num_held, num_held, 0)


def _rows_of_attention(module: Any, piece: str, rows: Tensor, rank: int) -> Tensor:
    q_size, kv_size = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
    if piece == "q":
        return _shifted(rows, rank * q_size, q_size, 0)
    first = rank // module.num_kv_head_replicas * kv_size  # ranks share a key head where there are few
    return _shifted(rows, first, kv_size, q_size if piece == "k" else q_size + kv_size)


def _rows_of_whole_attention(module: Any, num_rows: int, rows: Tensor, rank: int) -> Tensor:
    third, local = num_rows // 3, torch.full_like(rows, -1)
    for index, piece in enumerate("qkv"):
        own = rows // third == index
        local[own] = _rows_of_attention(module, piece, rows[own] - index * third, rank)
    return local


def _has_up_first(module: Any) -> bool:
    return bool(getattr(getattr(module, "quant_method", None), "load_up_proj_weight_first", False))


def _shifted(rows: Tensor, start: int, size: int, offset: int) -> Tensor:
    return torch.where((rows >= start) & (rows < start + size), rows - start + offset, -1)


# ---- Tensors of layers that Places does not know


class _Writes(TorchDispatchMode):
    """Notes the storages that are copied into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.storages.add(args[0].untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def _is_written(model: Any, name: str, tensor: Tensor) -> bool:
    """Whether loading the tensor writes to any parameter: SGLang passes over names it does not know in silence."""
    writes = _Writes()
    try:
        with writes:
            model.load_weights([(name, tensor)])
    except Exception:
        return False
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return bool(own & writes.storages)
