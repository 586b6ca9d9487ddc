"""What a serving engine's model holds of each tensor that a weight sync handed it, read back and compared.

For models in the style of vLLM and SGLang: their own names, q/k/v and gate/up fused into one parameter, rows or columns
split over the ranks of a tensor-parallel group, a padded vocabulary, experts stacked into two parameters. A tensor
whose place these rules do not find is not compared (`unread`), nor are experts once an engine has packed them for its
kernels: compare before it does. For both the canary is the proof.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_SAMPLED_VALUES = 32  # of each window
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Fused on both sides, in the same order. Other fused layers (query_key_value, c_attn ...) may be reordered when loaded.
_FUSED_ALIKE = ("qkv", "qkv_proj", "gate_up_proj")
_EXPERTS = re.compile(r"(.+\.experts)\.(?:(\d+)\.)?(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)(?:\.weight)?")

Pairs = Iterable[tuple[str, Tensor]]
Window = tuple[tuple[int, int, int], ...]  # (dim, start, length) each


class Place(NamedTuple):
    """A part of a parameter of the engine and the part of the given tensor that belongs there."""

    parameter: str
    held: Window
    given: Window


class _Sample(NamedTuple):
    name: str  # as given
    place: Place
    values: tuple[Tensor, ...]  # as given; of a square matrix also those of its transpose


class Landed:
    """Notes a few values of every tensor on its way into a model, and says afterwards which of them are not there."""

    def __init__(self, model: nn.Module, *, tp_rank: int = 0, tp_size: int = 1, compare_experts: bool = True) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._tp = (tp_rank, tp_size)
        self._compare_experts = compare_experts
        self._renamers = _renamers(self._modules)
        self._fused = _fused_layers(self._modules)
        self._samples: list[_Sample] = []
        self.unread: list[str] = []  # names whose place was not found

    def note(self, name: str, tensor: Tensor) -> bool:
        """Keeps values of the tensor; False where its place in the model is not known."""
        places = self.places(name, tuple(tensor.shape))
        if not places:
            self.unread.append(name)
            return False
        is_square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
        for place in places:
            held = self._parameters[place.parameter]
            # Some models keep a layer's matrix transposed (Conv1D); of a square one the shape does not tell.
            forms = [tensor, tensor.T] if is_square else [tensor]
            values = tuple(_sampled(_window(form, place.given)).to(held.device, held.dtype) for form in forms)
            self._samples.append(_Sample(name, place, values))
        return True

    def problems(self) -> list[str]:
        """A line for each tensor that the model does not hold as it was given."""
        wrong = {sample.name for sample in self._samples if not self._is_held(sample)}
        return [f"the engine does not hold {name} as it was given" for name in sorted(wrong)]

    def _is_held(self, sample: _Sample) -> bool:
        held = self._parameters[sample.place.parameter].detach()
        if not _fits(sample.place.held, held.shape):  # emptied or replaced meanwhile
            return False
        found = _sampled(_window(held, sample.place.held))
        return any(torch.allclose(found, value, rtol=0, atol=0, equal_nan=True) for value in sample.values)

    # ---- Where a tensor belongs --------------------------------------------------------------------------------

    def places(self, name: str, shape: tuple[int, ...]) -> list[Place]:
        """The parts of the model's parameters that hold this tensor; none where they are not known."""
        own = self.own_name(name)
        expert = _EXPERTS.fullmatch(own)
        if expert is not None:
            return self._expert_places(expert, shape) if self._compare_experts else []
        layer, _, leaf = own.rpartition(".")
        parent, _, last = layer.rpartition(".")
        if own in self._parameters:
            if last in _FUSED_ALIKE:
                return self._split_places(own, layer, shape)
            return self._plain_place(own, layer, shape) if self._is_plain(layer) else []
        fused, index = self._fused.get(last, ("", 0))
        fused_layer = f"{parent}.{fused}" if parent else fused
        if f"{fused_layer}.{leaf}" in self._parameters:
            return self._fused_place(f"{fused_layer}.{leaf}", fused_layer, index, shape)
        return []

    def own_name(self, name: str) -> str:
        """The engine's name of a parameter, by the renaming rules of its model and of the models inside it."""
        for prefix, rename in self._renamers:
            if name.startswith(prefix):
                name = prefix + (rename(name.removeprefix(prefix)) or name.removeprefix(prefix))
        return name

    def _is_plain(self, layer: str) -> bool:
        return len(getattr(self._modules.get(layer), "output_sizes", ())) < 2

    def _rank_of(self, layer: str) -> tuple[int, int]:
        module = self._modules.get(layer)
        return getattr(module, "tp_rank", self._tp[0]), getattr(module, "tp_size", self._tp[1])

    def _plain_place(self, own: str, layer: str, shape: tuple[int, ...]) -> list[Place]:
        """The whole tensor, or this rank's slice of its one split dimension."""
        held = tuple(self._parameters[own].shape)
        if held == shape:
            return [Place(own, (), ())]
        rows = getattr(self._modules.get(layer), "shard_indices", None)
        if rows is not None and held[1:] == shape[1:]:  # a vocabulary, padded and perhaps split
            start, end = rows.org_vocab_start_index, rows.org_vocab_end_index
            return [Place(own, ((0, 0, end - start),), ((0, start, end - start),))] if end > start else []
        rank, size = self._rank_of(layer)
        split = [dim for dim, (own_size, full) in enumerate(zip(held, shape, strict=False)) if own_size != full]
        if len(held) != len(shape) or len(split) != 1 or held[split[0]] * size != shape[split[0]]:
            return []
        (dim,) = split
        return [Place(own, (), ((dim, rank * held[dim], held[dim]),))]

    def _parts(self, layer: str) -> list[tuple[int, int, int]]:
        """(rows on this rank, whole rows, first row of this rank's slice) of each part of a fused layer."""
        module: Any = self._modules[layer]
        rank, size = self._rank_of(layer)
        if not hasattr(module, "total_num_kv_heads"):
            return [(whole // size, whole, rank * (whole // size)) for whole in module.output_sizes]
        head, value_head = module.head_size, getattr(module, "v_head_size", module.head_size)
        kv_rank = rank // module.num_kv_head_replicas
        parts = [(module.num_heads * head, module.total_num_heads * head, rank)]
        parts += [
            (module.num_kv_heads * each, module.total_num_kv_heads * each, kv_rank) for each in (head, value_head)
        ]
        return [(rows, whole, slot * rows) for rows, whole, slot in parts]

    def _fused_place(self, own: str, layer: str, index: int, shape: tuple[int, ...]) -> list[Place]:
        """One of the tensors that the engine keeps in one parameter."""
        if not hasattr(self._modules.get(layer), "output_sizes"):
            return []
        parts = self._parts(layer)
        rows, whole, first = parts[index]
        if index >= len(parts) or shape[0] != whole or shape[1:] != tuple(self._parameters[own].shape[1:]):
            return []
        offset = sum(part[0] for part in parts[:index])
        return [Place(own, ((0, offset, rows),), ((0, first, rows),))]

    def _split_places(self, own: str, layer: str, shape: tuple[int, ...]) -> list[Place]:
        """A tensor that is fused on both sides: the trainer's parts lie one behind the other, whole."""
        if not hasattr(self._modules.get(layer), "output_sizes"):
            return self._plain_place(own, layer, shape)
        parts, held = self._parts(layer), self._parameters[own].shape
        if shape[0] != sum(part[1] for part in parts) or shape[1:] != tuple(held[1:]):
            return []
        places, offset, start = [], 0, 0
        for rows, whole, first in parts:
            places.append(Place(own, ((0, offset, rows),), ((0, start + first, rows),)))
            offset, start = offset + rows, start + whole
        return places

    def _expert_places(self, match: re.Match[str], shape: tuple[int, ...]) -> list[Place]:
        """Experts, stacked as transformers has them in memory or one by one as in a checkpoint."""
        prefix, expert, part = match.groups()
        is_down = part in ("down_proj", "w2")
        ending = "w2_weight" if is_down else "w13_weight"
        own = next((name for name in self._parameters if name.startswith(f"{prefix}.") and name.endswith(ending)), None)
        if own is None:
            return []
        held = tuple(self._parameters[own].shape)  # [experts, 2 x intermediate / tp, hidden] or [.., hidden, inter.]
        rank, size = self._tp
        which: Window = () if expert is None else ((0, int(expert), 1),)
        inner = held[2] if is_down else held[1] // 2
        dim = (1 if is_down else 0) + (expert is None)  # of the given tensor, that is split over the ranks
        halves = ["gate", "up"] if part == "gate_up_proj" else ["up"] if part in ("up_proj", "w3") else ["gate"]
        whole = (inner * size * len(halves), held[1 if is_down else 2])
        expected = whole[::-1] if is_down else whole
        if shape != (expected if expert is not None else (held[0], *expected)):
            return []
        if is_down:
            return [Place(own, which, ((dim, rank * inner, inner),))]
        return [
            Place(own, (*which, (1, (half == "up") * inner, inner)), ((dim, (i * size + rank) * inner, inner),))
            for i, half in enumerate(halves)
        ]


def _renamers(modules: Mapping[str, nn.Module]) -> list[tuple[str, Callable[[str], str | None]]]:
    """(prefix, rule) for each model that renames, outermost first; rules that also fuse are left to _fused_layers."""
    found: list[tuple[str, Callable[[str], str | None]]] = []
    for path, module in modules.items():
        mapper: Any = getattr(module, "hf_to_vllm_mapper", None) or getattr(module, "hf_to_sglang_mapper", None)
        if mapper is not None and hasattr(mapper, "orig_to_new_prefix"):
            found.append((f"{path}." if path else "", partial(_renamed, mapper)))
    return sorted(found, key=lambda item: item[0].count("."))


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
    """From the last part of a layer's name to the engine's fused layer and the place in it."""
    rules: dict[str, Sequence[str]] = dict(_FUSED)
    for module in modules.values():
        own = getattr(module, "packed_modules_mapping", None)
        rules.update(own if isinstance(own, dict) else {})
    return {part: (fused, i) for fused, parts in rules.items() for i, part in enumerate(parts) if part != fused}


def _window(tensor: Tensor, window: Window) -> Tensor:
    for dim, start, length in window:
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _fits(window: Window, shape: torch.Size) -> bool:
    return 0 not in shape and all(dim < len(shape) and start + length <= shape[dim] for dim, start, length in window)


def _sampled(tensor: Tensor) -> Tensor:
    """Copies of values spread over rows and columns alike; by index, since flattening a view would copy it whole."""
    count = min(_SAMPLED_VALUES, tensor.numel())
    stride = max(1, tensor.numel() // max(1, count)) | 1  # odd: it meets every column of a width that is a power of two
    places = torch.arange(count, device=tensor.device) * stride % max(1, tensor.numel())
    return tensor.detach()[torch.unravel_index(places, tensor.shape)]


# ---- Handing the tensors over


class Delivery:
    """Feeds (HF name, whole tensor) pairs to an engine's loader and keeps account of what was wrong with each."""

    def __init__(
        self,
        load: Callable[[Pairs], Iterable[str] | None],
        landed: Landed,
        expected: Mapping[str, tuple[int, ...]],
        *,
        can_load_one: bool = True,
    ) -> None:
        """expected: the shape of every parameter of the trainer, tied ones under each of their names.

        can_load_one: the loader may be called with one pair while another call of it is under way.
        """
        self._load = load
        self._landed = landed
        self._expected = expected
        self._can_load_one = can_load_one
        self._current = ""
        self._is_over = False
        self._broken: BaseException | None = None
        self.seen: set[str] = set()
        self.loaded: set[str] = set()  # the engine's own names, as far as its loader tells them
        self.problems: list[str] = []

    def run(self, weights: Pairs) -> None:
        """To the end of the pairs even when one does not fit: on other ranks they may come out of collectives."""
        stream = iter(weights)
        while not self._is_over:
            before = len(self.seen), len(self.problems)
            try:
                self.loaded.update(self._load(self._checked(stream)) or ())
            except Exception as error:
                if self._broken is not None:
                    raise self._broken from None
                self.problems.append(f"{self._current} was refused: {_first_line(error)}")
            if not self._is_over and before == (len(self.seen), len(self.problems)):
                self.problems.append(f"the loader stopped at {self._current or 'the first parameter'}")
                for _ in self._checked(stream):
                    pass

    def _checked(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        while True:
            try:
                name, tensor = next(stream)
            except StopIteration:
                self._is_over = True
                return
            except BaseException as error:
                self._broken = error
                raise
            if self._fits(name, tensor):
                self._current = name
                self.seen.add(name)
                if self._landed.note(name, tensor) or not self._can_load_one:
                    yield name, tensor
                else:
                    self._load_one(name, tensor)

    def _fits(self, name: str, tensor: Tensor) -> bool:
        if name not in self._expected:
            self.problems.append(f"unknown {name}")
        elif tuple(tensor.shape) != self._expected[name]:
            self.problems.append(f"misshapen {name}: got {tuple(tensor.shape)}, not {self._expected[name]}")
        else:
            return True
        return False

    def _load_one(self, name: str, tensor: Tensor) -> None:
        """By itself, so that a loader that ignores the name in silence is found out."""
        try:
            loaded = self._load([(name, tensor)])
        except Exception as error:
            self.problems.append(f"{name} was refused: {_first_line(error)}")
            return
        if loaded is not None and not set(loaded):
            self.problems.append(f"{name} was ignored by the engine's loader")
        self.loaded.update(loaded or ())

    def missing(self, tied: Iterable[frozenset[str]]) -> list[str]:
        """The parameters that did not come; of tied ones, one of the names is enough."""
        groups = {name: group for group in tied for name in group}
        absent = [name for name in self._expected if not self.seen & groups.get(name, frozenset([name]))]
        return [f"missing {name}" for name in sorted(absent)]


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def named_shapes(model: nn.Module) -> tuple[dict[str, tuple[int, ...]], list[frozenset[str]]]:
    """The whole shape of every parameter under each of its names, and the groups of names of one tied parameter."""
    named = dict(model.named_parameters(remove_duplicate=False))
    by_identity: dict[int, list[str]] = {}
    for name, parameter in named.items():
        by_identity.setdefault(id(parameter), []).append(name)
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    return shapes, [frozenset(names) for names in by_identity.values() if len(names) > 1]
