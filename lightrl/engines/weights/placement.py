"""Finds where a serving engine keeps each tensor of a weight sync, to read its values back and compare them.

vLLM and SGLang build models in the same style: their own names, q/k/v and gate/up fused into one parameter, rows or
columns split over the ranks of a tensor-parallel group, a padded vocabulary, experts stacked into two parameters. A
tensor that these rules do not find is not compared; for such tensors, the canary is the proof.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from lightrl.engines.weights.account import Place, Shape, Window

_READABLE = (torch.float32, torch.bfloat16, torch.float16)  # other types hold quantised values
_REMADE = re.compile(r"\b(A_weight_loader|composed_weight_loader)\b")  # loaders of -exp(A_log) and the like
_DEALT = "mamba_v2_sharded_weight_loader"  # loader of parts that are split one by one, which no name shows
_EXPERTS = re.compile(r"(.+\.experts)\.(?:(\d+)\.)?(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)(?:\.weight)?")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # the server's: ours
# Layers that the checkpoint also fuses in the same order. Others (query_key_value, c_attn ...) may be reordered.
_FUSED_ALIKE = ("qkv", "qkv_proj", "gate_up_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRules:
    """How a server names and holds the layers of its models."""

    renamed: Mapping[str, str] = field(default_factory=dict)  # layers whose name differs from the checkpoint's
    finds_by_ending: bool = False  # whether the ending of a name identifies the only parameter that has it
    compares_experts: bool = True  # False for a server that packs them while it loads
    pads: bool = False  # whether a layer may be wider than the checkpoint's


class Placement:
    """Finds the part of a model's parameter that holds a tensor of the checkpoint."""

    def __init__(self, model: nn.Module, rules: ServerRules, *, tp_rank: int = 0, tp_size: int = 1) -> None:
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._rules = rules
        self._tp = (tp_rank, tp_size)
        self._renamers = _renamers(self._modules)
        self._fused = _fused_layers(self._modules)
        self._by_ending = _names_by_ending(self.parameters) if rules.finds_by_ending else {}

    def places(self, name: str, shape: Shape) -> list[Place] | None:
        """Returns the places where this rank keeps parts of the tensor; None if unknown."""
        places = self._places(self.own_name(name), shape)
        if any(not _is_comparable(self.parameters[place.parameter], shape) for place in places or ()):
            return None
        return places

    def part_of(self, place: Place) -> int:
        """Returns the index of a place among the tensors in one parameter; 0 if there is only one."""
        start = next((first for dim, first, _ in place.held if dim == 0), 0)
        layer = place.parameter.rpartition(".")[0]
        ends = accumulate(rows for rows, _, _ in self._parts(layer)) if start else ()
        return sum(end <= start for end in ends)

    def has_home(self, name: str) -> bool:
        """Returns whether the server has the module that holds a tensor's layer, under its own name for it."""
        return ".".join(self.own_name(name).split(".")[:-2]) in self._modules

    def own_name(self, name: str) -> str:
        """Returns a tensor's name after the renaming rules of the model and of the models inside it."""
        for prefix, rename in self._renamers:
            if name.startswith(prefix):
                name = prefix + (rename(name.removeprefix(prefix)) or name.removeprefix(prefix))
        return name

    def _places(self, own: str, shape: Shape) -> list[Place] | None:
        expert = _EXPERTS.fullmatch(own)
        if expert is not None:
            return self._expert_places(expert, shape) if self._rules.compares_experts else None
        parent, last, leaf = _split_name(own)
        for layer in (last, self._rules.renamed.get(last)):
            held = self._known(_join(parent, layer, leaf)) if layer is not None else None
            places = self._whole_places(held, shape) if held is not None else None
            if places is not None:
                return places
        fused, index = self._fused.get(last, (None, 0))
        held = self._known(_join(parent, fused, leaf)) if fused is not None else None
        return self._fused_place(held, index, shape) if held is not None else None

    def _known(self, name: str) -> str | None:
        """Returns the parameter of this name, or else the only one that shares the longest ending with it."""
        if name in self.parameters:
            return name
        parts = name.split(".")
        for start in range(1, len(parts) - 1):
            same = self._by_ending.get(".".join(parts[start:]), [])
            if same:
                return same[0] if len(same) == 1 else None
        return None

    def _whole_places(self, own: str, shape: Shape) -> list[Place] | None:
        """Returns the places of a tensor that has a parameter to itself."""
        layer = own.rpartition(".")[0]
        num_parts = len(getattr(self._modules.get(layer), "output_sizes", ()))
        if num_parts and layer.rpartition(".")[2] in _FUSED_ALIKE:
            return self._split_places(own, layer, shape)
        return self._plain_place(own, layer, shape) if num_parts < 2 else None

    def _rank_of(self, layer: str) -> tuple[int, int]:
        module = self._modules.get(layer)
        return getattr(module, "tp_rank", self._tp[0]), getattr(module, "tp_size", self._tp[1])

    def _plain_place(self, own: str, layer: str, shape: Shape) -> list[Place] | None:
        """Returns the place of the whole tensor, or of this rank's slice of its one split dimension."""
        held = tuple(self.parameters[own].shape)
        is_flattened = held[:1] == shape[:1] and self.parameters[own].numel() == torch.Size(shape).numel()
        if held == shape or is_flattened or (len(shape) == 2 and held == shape[::-1]):
            return [Place(own)]
        vocabulary = getattr(self._modules.get(layer), "shard_indices", None)
        if vocabulary is not None and held[1:] == shape[1:]:  # it is padded and perhaps split
            start, end = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
            return [Place(own, ((0, 0, end - start),), ((0, start, end - start),))] if end > start else []
        rank, size = self._rank_of(layer)
        split = [dim for dim, (own_size, full) in enumerate(zip(held, shape, strict=False)) if own_size != full]
        if len(held) != len(shape) or len(split) != 1:
            return None
        (dim,) = split
        first = rank * held[dim]
        length = self._num_here(held[dim], held[dim] * size, first, shape[dim])
        if not length:
            return None if length is None else []
        return [Place(own, () if length == held[dim] else ((dim, 0, length),), ((dim, first, length),))]

    def _num_here(self, own: int, whole: int, first: int, given: int) -> int | None:
        """Returns how many of the given rows this rank's slice has; None if the server's whole size differs."""
        if given != whole and not (self._rules.pads and given < whole):
            return None
        return max(0, min(own, given - first))

    def _parts(self, layer: str) -> list[tuple[int, int, int]]:
        """Returns (rows on this rank, whole rows, first row of this rank's slice) of each part of a fused layer."""
        module: Any = self._modules[layer]
        rank, size = self._rank_of(layer)
        if not hasattr(module, "total_num_kv_heads"):
            return [(whole // size, whole, rank * (whole // size)) for whole in module.output_sizes]
        head, value_head = module.head_size, getattr(module, "v_head_size", module.head_size)
        kv_rank = rank // module.num_kv_head_replicas  # ranks share a key head if there are few
        parts = [(module.num_heads * head, module.total_num_heads * head, rank)]
        parts += [
            (module.num_kv_heads * each, module.total_num_kv_heads * each, kv_rank) for each in (head, value_head)
        ]
        return [(rows, whole, slot * rows) for rows, whole, slot in parts]

    def _fused_place(self, own: str, index: int, shape: Shape) -> list[Place] | None:
        """Returns the place of a tensor that the server keeps in one parameter with others."""
        layer = own.rpartition(".")[0]
        if not hasattr(self._modules.get(layer), "output_sizes"):
            return None
        parts = self._parts(layer)
        if index >= len(parts) or shape[1:] != tuple(self.parameters[own].shape[1:]):
            return None
        rows, whole, first = parts[index]
        length = self._num_here(rows, whole, first, shape[0])
        if not length:
            return None if length is None else []
        offset = sum(part[0] for part in parts[:index])
        return [Place(own, ((0, offset, length),), ((0, first, length),))]

    def _split_places(self, own: str, layer: str, shape: Shape) -> list[Place] | None:
        """Returns the places of a tensor that is fused on both sides: whole parts, one after the other."""
        parts, held = self._parts(layer), self.parameters[own].shape
        if shape[0] != sum(part[1] for part in parts) or shape[1:] != tuple(held[1:]):
            return None
        places, offset, start = [], 0, 0
        for rows, whole, first in parts:
            places.append(Place(own, ((0, offset, rows),), ((0, start + first, rows),)))
            offset, start = offset + rows, start + whole
        return places

    def _expert_places(self, match: re.Match[str], shape: Shape) -> list[Place] | None:
        """Returns the places of experts, stacked as in transformers' memory or one by one."""
        prefix, expert, part = match.groups()
        is_down = part in ("down_proj", "w2")
        own = self._expert_parameter(prefix, "w2_weight" if is_down else "w13_weight")
        if own is None:
            return None
        held = tuple(self.parameters[own].shape)  # [experts, 2 x intermediate / tp, hidden] or [.., hidden, inter.]
        module = self._modules.get(own.rpartition(".")[0])
        rank, size = getattr(module, "moe_tp_rank", self._tp[0]), getattr(module, "moe_tp_size", self._tp[1])
        local = None if expert is None else int(expert) - getattr(module, "moe_ep_rank", 0) * held[0]
        inner = held[2] if is_down else held[1] // 2
        dim = (1 if is_down else 0) + (expert is None)  # dimension of the given tensor that is split over the ranks
        halves = ["gate", "up"] if part == "gate_up_proj" else ["up"] if part in ("up_proj", "w3") else ["gate"]
        given = shape[dim] // len(halves) if dim < len(shape) else 0
        expected = (held[1], given) if is_down else (given * len(halves), held[2])
        length = self._num_here(inner, inner * size, rank * inner, given)
        if length is None or shape != (expected if expert is not None else (held[0], *expected)):
            return None
        if not length or (local is not None and not 0 <= local < held[0]):
            return []  # another rank has it
        which: Window = () if local is None else ((0, local, 1),)
        if is_down:
            columns: Window = () if length == inner else ((2, 0, length),)
            return [Place(own, (*which, *columns), ((dim, rank * inner, length),))]
        first = "up" if _has_up_first(module) else "gate"
        return [
            Place(own, (*which, (1, (half != first) * inner, length)), ((dim, i * given + rank * inner, length),))
            for i, half in enumerate(halves)
        ]

    def _expert_parameter(self, prefix: str, ending: str) -> str | None:
        inside = (name for name in self.parameters if name.startswith(f"{prefix}.") and name.endswith(ending))
        return self._known(f"{prefix}.{ending}") or next(inside, None)


def _is_comparable(parameter: nn.Parameter, shape: Shape) -> bool:
    """Returns whether a parameter holds values of the checkpoint's tensor of this shape, in the same order."""
    loader = getattr(getattr(parameter, "weight_loader", None), "__qualname__", "")
    is_dealt = _DEALT in loader and tuple(parameter.shape) != shape
    return parameter.dtype in _READABLE and not is_dealt and _REMADE.search(loader) is None


def _has_up_first(module: Any) -> bool:
    return bool(getattr(getattr(module, "quant_method", None), "load_up_proj_weight_first", False))


def _split_name(name: str) -> tuple[str, str, str]:
    """Splits a name like "model.layers.0.q_proj.weight" into parent module, layer and parameter."""
    layer, _, leaf = name.rpartition(".")
    parent, _, last = layer.rpartition(".")
    return parent, last, leaf


def _join(parent: str, layer: str, leaf: str) -> str:
    return ".".join(part for part in (parent, layer, leaf) if part)


def _names_by_ending(names: Mapping[str, Any]) -> dict[str, list[str]]:
    by_ending: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for start in range(len(parts) - 1):
            by_ending.setdefault(".".join(parts[start:]), []).append(name)
    return by_ending


def _renamers(modules: Mapping[str, nn.Module]) -> list[tuple[str, Callable[[str], str | None]]]:
    """Returns (prefix, rule) for each model that renames, outermost first; _fused_layers reads rules that also fuse.

    modules: in the order of named_modules(), which yields a module before those inside it.
    The attributes of WeightsMapper: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/utils.py
    """
    renamers: list[tuple[str, Callable[[str], str | None]]] = []
    for path, module in modules.items():
        mapper: Any = getattr(module, "hf_to_vllm_mapper", None) or getattr(module, "hf_to_sglang_mapper", None)
        if mapper is not None and hasattr(mapper, "orig_to_new_prefix"):
            renamers.append((f"{path}." if path else "", partial(_renamed, mapper)))
    return renamers


def _renamed(mapper: Any, name: str) -> str:
    for old, new in mapper.orig_to_new_substr.items():
        name = name.replace(old, new, 1) if new is not None else name
    for old, new in mapper.orig_to_new_prefix.items():
        if new is not None and name.startswith(old):
            name = name.replace(old, new, 1)
    for old, new in mapper.orig_to_new_suffix.items():
        if new is not None and name.endswith(old):
            name = name.removesuffix(old) + new
    return name


def _fused_layers(modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, int]]:
    """Returns the server's fused layer, and the index in it, for the last part of a layer's name."""
    fused: dict[str, Sequence[str]] = dict(_FUSED)
    for module in modules.values():
        own = getattr(module, "packed_modules_mapping", None)
        fused.update(own if isinstance(own, dict) else {})
    return {part: (name, i) for name, parts in fused.items() for i, part in enumerate(parts) if part != name}
