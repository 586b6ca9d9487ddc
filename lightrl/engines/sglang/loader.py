"""Loads weights into SGLang's scheduler processes: packs a bucket, loads it, and reads it back.

load_bucket runs in the schedulers, which SGLang tells to call it by name. It must not raise, since an error would end
the scheduler and with it the run. It writes problems to a report instead, which the engine's owner reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightrl.engines.weights.account import is_held, sampled_indices
from lightrl.engines.weights.placement import Placement, ServerRules

LOADER = f"{__name__}.load_bucket"
RULES = ServerRules(renamed={"qkv": "qkv_proj"}, finds_by_ending=True, pads=True)
_ALIGNMENT = 16  # bytes: a view as a wider type must begin at a multiple of its size


# ---- The trainer's side


@dataclass(slots=True)
class Bucket:
    """Tensors that are sent together, with some values by which they are recognised."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor under its checkpoint name."""
        self.tensors.append((name, tensor.detach()))
        self.num_bytes += _padded(tensor.numel() * tensor.element_size())

    def pack(self, *, report: str, is_first: bool, is_last: bool, device: torch.device) -> list[tuple[str, Tensor]]:
        """Returns two byte tensors: all values, and a JSON description of them. Frees the tensors once copied."""
        flat = torch.empty(max(self.num_bytes, _ALIGNMENT), dtype=torch.uint8, device=device)
        described: list[dict[str, Any]] = []
        start = 0
        for name, tensor in self.tensors:
            size = tensor.numel() * tensor.element_size()
            flat[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            described.append({"name": name, "dtype": dtype, "start": start, **description(tensor)})
            start += _padded(size)
        self.tensors, self.num_bytes = [], 0
        head = {"report": report, "is_first": is_first, "is_last": is_last, "tensors": described}
        # On the values' device, so that the same kind of handle carries both to another process.
        written = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8).to(device)
        return [("values", flat), ("head", written)]


def description(tensor: Tensor) -> dict[str, Any]:
    """Returns the shape and a few values, which float64 holds exactly."""
    values = tensor.detach()[sampled_indices(tuple(tensor.shape), device=tensor.device)].double().tolist()
    return {"shape": list(tensor.shape), "values": values}


def read_reports(folder: Path, count: int) -> tuple[list[str], list[str]]:
    """Returns (problems, names that cannot be read back) from the schedulers' reports, and removes their files."""
    problems: dict[str, None] = {}
    unread: dict[str, None] = {}
    files = sorted(folder.glob("*.json"))
    for file in files:
        report = json.loads(file.read_text())
        problems |= dict.fromkeys(report["problems"])
        unread |= dict.fromkeys(report["unread"])
        file.unlink()
    if len(files) != count:
        problems[f"{len(files)} of {count} schedulers reported that they loaded the weights"] = None
    return list(problems), list(unread)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# ---- The scheduler's side


@dataclass(slots=True)
class _Sync:
    """The state of one sync in a scheduler: the contents of its buckets so far."""

    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # loaded, but it is not known where
    problems: list[str] = field(default_factory=list)


_sync = _Sync()


class Extras(Protocol):
    """Tensors of a bucket that the model's own loader does not know."""

    def begin(self) -> None:
        """Starts a sync; called before its first bucket."""

    def take(self, item: dict[str, Any], tensor: Tensor) -> bool:
        """Takes the described tensor, whose memory is lent, if it is one of these; returns whether it did."""

    def finish(self, placement: Placement) -> list[str]:
        """Puts the tensors in their places after the last bucket; returns the problems."""


def load_bucket(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]], extras: Extras | None = None) -> None:
    """Loads a packed bucket; after the last bucket, reads everything back and writes the report."""
    global _sync
    parts = dict(named_tensors)
    head = json.loads(parts["head"].cpu().numpy().tobytes())
    if head["is_first"]:
        _sync = _Sync()
        if extras is not None:
            extras.begin()
    try:
        _load(model, _unpack(parts["values"], head["tensors"], extras))
        if head["is_last"]:
            _read_back(model)
            _sync.problems += extras.finish(_placement(model)) if extras is not None else []
    except Exception as error:
        _sync.problems.append(f"{type(error).__name__}: {error}")
    if head["is_last"]:
        _write_report(Path(head["report"]))


def _unpack(flat: Tensor, described: Sequence[dict[str, Any]], extras: Extras | None) -> list[tuple[str, Tensor]]:
    tensors = []
    for item in described:
        dtype: torch.dtype = getattr(torch, item["dtype"])
        shape = torch.Size(item["shape"])
        size = shape.numel() * dtype.itemsize
        tensor = flat[item["start"] : item["start"] + size].view(dtype).view(shape)
        if extras is None or not extras.take(item, tensor):
            tensors.append((item["name"], tensor))
            _sync.given[item["name"]] = item
    return tensors


def _load(model: Any, tensors: list[tuple[str, Tensor]]) -> None:
    if not tensors:
        return
    placement = _placement(model)
    try:
        model.load_weights(list(tensors))
    except Exception:  # loading all together does not show which one is wrong
        _load_one_by_one(model, tensors)
    for name, tensor in tensors:
        if placement.places(name, tuple(tensor.shape)) is None and _is_written(model, name, tensor):
            _sync.written.add(name)


def _load_one_by_one(model: Any, tensors: list[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        try:
            model.load_weights([(name, tensor)])
        except Exception as error:
            _sync.problems.append(f"{name} does not fit: {type(error).__name__} {str(error).partition(chr(10))[0]}")


def _read_back(model: nn.Module) -> None:
    placement = _placement(model)
    failed = {problem.split(" ", 1)[0] for problem in _sync.problems}
    for name, item in _sync.given.items():
        if name in failed or name in _sync.written:
            continue
        is_where_it_belongs = is_loaded(placement, name, item)
        if is_where_it_belongs is None:
            _sync.problems.append(f"{name} is no parameter of {type(model).__name__} in SGLang")
        elif not is_where_it_belongs:
            _sync.problems.append(f"{name} is not held as it was given")


def is_loaded(placement: Placement, name: str, item: dict[str, Any]) -> bool | None:
    """Returns whether the model holds this rank's part of a tensor's described values; None if unknown."""
    shape = tuple(item["shape"])
    places = placement.places(name, shape)
    if places is None:
        return None
    where = sampled_indices(shape)
    values = torch.tensor(item["values"], dtype=torch.float64)
    return all(is_held(placement.parameters[place.parameter], place, shape, where, values) for place in places)


def _write_report(folder: Path) -> None:
    file = folder / f"{os.getpid()}.json"
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps({"problems": _sync.problems, "unread": sorted(_sync.written)}))
    unfinished.rename(file)


def _placement(model: nn.Module) -> Placement:
    rank, size = _tp_rank_and_size()
    return Placement(model, RULES, tp_rank=rank, tp_size=size)


def _tp_rank_and_size() -> tuple[int, int]:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank), int(get_parallel().tp_size)


# ---- Tensors of layers that the placement rules do not know


class _Writes(TorchDispatchMode):
    """Records the storages that are copied into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.storages.add(args[0].untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def _is_written(model: Any, name: str, tensor: Tensor) -> bool:
    """Returns whether loading the tensor writes to any parameter, since SGLang skips unknown names."""
    writes = _Writes()
    try:
        with writes:
            model.load_weights([(name, tensor)])
    except Exception:  # a loader that refuses the tensor has not written it, whatever the error
        return False
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return bool(own & writes.storages)
