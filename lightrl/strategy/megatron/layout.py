"""MegatronLayout: the Hugging Face parameters of a model, while their values lie in Megatron's modules.

The trainer's model keeps its parameters on the meta device, with their names and whole shapes. An attribute of each
parameter says which part of it this rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.optim import Optimizer

from lightrl.comm import Comm
from lightrl.engines.base import NamedTensors
from lightrl.engines.weights.fingerprint import Span, span_of
from lightrl.strategy.layout.buckets import buckets
from lightrl.strategy.layout.plain import Piece, PlainLayout, SavedTensors
from lightrl.strategy.megatron.main_copies import copies_of, is_emptied
from lightrl.strategy.megatron.parts import Part
from lightrl.strategy.optim.optimizers import refuse_without_main_copies

HELD = "megatron_held"  # attribute of a parameter, of a model or an optimizer: what this rank holds of it, or None
_WORD = 8  # bytes; in a joint gather, each tensor begins at a whole word


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rank's part of one tensor, and the ranks with which it shares that part."""

    local: nn.Parameter  # in a module, or its main copy; a vocabulary's ends with rows of padding
    part: Part
    is_first_holder: bool  # true on exactly one of the ranks that hold the same values
    sums: tuple[dist.ProcessGroup, ...]  # a gradient is summed over each of them
    replicas: dist.ProcessGroup
    owner: int  # the replica that steps the parameter; -1: all do
    has_states: bool  # true on exactly one of the ranks that have the same optimizer states

    def values(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the parameter's size without the padding."""
        detached = tensor.detach()
        if is_emptied(detached):
            refuse_without_main_copies()
        return detached if detached.shape == self.part.shape else detached[: self.part.shape[0]]

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor, as a view."""
        return whole.reshape(self.part.view)[_slices(self.part)]

    @property
    def is_stepped_here(self) -> bool:
        """Whether this rank's optimizer has the parameter's states."""
        return self.owner < 0 or dist.get_rank(self.replicas) == self.owner


def _slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.offsets, part.shape, strict=True))


def is_placed(tensor: Tensor) -> bool:
    """Returns whether this is a parameter whose values lie in Megatron's modules."""
    return hasattr(tensor, HELD)


def held_of(parameter: Tensor) -> Held | None:
    """Returns what this rank holds of a placed parameter."""
    held: Held | None = getattr(parameter, HELD)
    return held


def held_parts(model: nn.Module) -> list[Held]:
    """Returns what this rank holds of a model's parameters, in the order of their names."""
    found = (held_of(parameter) for _, parameter in sorted(model.named_parameters()) if is_placed(parameter))
    return [held for held in found if held is not None]


class _Gathered(NamedTuple):
    """A tensor that every rank needs whole, and the values that this rank adds to it."""

    name: str
    shape: Size
    dtype: torch.dtype
    part: Part | None
    values: Tensor | None

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor, rounded up to whole words."""
        return math.ceil(self.shape.numel() * self.dtype.itemsize / _WORD) * _WORD


class MegatronLayout(PlainLayout):
    """Reads and writes placed parameters, and plain tensors beside them."""

    def __init__(self, comm: Comm, *, device: torch.device, bucket_bytes: int) -> None:
        super().__init__(comm)
        self._device = device
        self._bucket_bytes = bucket_bytes

    def is_whole(self, tensor: Tensor) -> bool:
        return not is_placed(tensor)

    def detached(self, parameter: Tensor) -> Tensor:
        return parameter if is_placed(parameter) else parameter.detach()

    def shard(self, parameter: Tensor) -> Tensor:
        if not is_placed(parameter):
            return parameter.detach()
        held = held_of(parameter)
        return torch.empty(0, dtype=parameter.dtype, device=self._device) if held is None else held.values(held.local)

    def shard_of_whole(self, parameter: Tensor, whole: Tensor) -> Tensor:
        if not is_placed(parameter):
            return whole
        held = held_of(parameter)
        return whole.new_empty(0) if held is None else held.cut(whole)

    def span(self, parameter: Tensor) -> Span:
        held = held_of(parameter) if is_placed(parameter) else None
        return Span() if held is None else span_of(held.part.view, held.part.shape, held.part.offsets)

    def is_first_holder(self, parameter: Tensor) -> bool:
        if not is_placed(parameter):
            return super().is_first_holder(parameter)
        held = held_of(parameter)
        return held is not None and held.is_first_holder

    # ---- Whole tensors -----------------------------------------------------------------------------------------

    def gather_named(self, named: NamedTensors, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        def wanted() -> Iterator[_Gathered]:
            for name, tensor in named:
                kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
                held = held_of(tensor)
                is_first = held is not None and held.is_first_holder
                values = held.values(held.local) if held is not None and is_first else None
                yield _Gathered(name, tensor.shape, kind, held.part if held is not None else None, values)

        plain: list[tuple[str, Tensor]] = []
        placed: list[tuple[str, Tensor]] = []
        for name, tensor in named:
            (placed if is_placed(tensor) else plain).append((name, tensor))
        named = placed
        whole = self._gather(wanted())
        if not plain:
            yield from whole
            return
        found = dict(super().gather_named(plain, dtype)) | dict(whole)
        for name in sorted(found):
            yield name, found[name]

    def _gather(self, items: Iterable[_Gathered]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor), summed over the ranks as bits: all ranks but one have zeros."""
        pairs = ((item.name, item) for item in items)
        for bucket in buckets(pairs, lambda item: item.num_bytes, self._bucket_bytes // 2):  # type: ignore[arg-type, attr-defined]
            entries: list[Any] = [item for _, item in bucket]
            starts = [0]
            for item in entries:
                starts.append(starts[-1] + item.num_bytes)
            bits = torch.zeros(starts[-1] // _WORD, dtype=torch.int64, device=self._device)
            content = bits.view(torch.uint8)
            for item, start in zip(entries, starts, strict=False):
                if item.values is not None:
                    _typed(content, start, item).view(item.part.view)[_slices(item.part)] = item.values
            if self.comm.world > 1:
                content = self.comm.all_reduce(bits, "sum").view(torch.uint8)
            for item, start in zip(entries, starts, strict=False):
                yield item.name, _typed(content, start, item).view(item.shape)

    def pieces(self, named: NamedTensors) -> Iterator[Piece]:
        return (Piece(name, whole) for name, whole in self.gather_named(named))

    # ---- Optimizer states --------------------------------------------------------------------------------------

    def optimizer_states(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Gathers the states by the names of the parameters; the ranks first agree on which states exist."""
        parameters = {name: item for name, item in sorted(model.named_parameters()) if is_placed(item)}
        own: dict[str, dict[str, Any]] = {}
        for name, parameter in parameters.items():
            held = held_of(parameter)
            if held is not None and held.has_states:
                own[name] = {key: _described(held, value) for key, value in optimizer.state.get(held.local, {}).items()}
        states: dict[str, dict[str, Any]] = {}
        for found in self.comm.all_gather_object(own):
            states |= found
        wholes = self._gather(self._state_items(parameters, states, optimizer))
        scalars = {f"{n}/{k}": v for n, keys in states.items() for k, v in keys.items() if torch.is_tensor(v)}
        yield from sorted(scalars.items())
        yield from wholes

    def _state_items(
        self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, Mapping[str, Any]], optimizer: Optimizer
    ) -> Iterator[_Gathered]:
        for name, parameter in parameters.items():
            held = held_of(parameter)
            for key, kind in sorted(states.get(name, {}).items()):
                if torch.is_tensor(kind):
                    continue
                is_mine = held is not None and held.has_states
                values = held.values(optimizer.state[held.local][key]) if held is not None and is_mine else None
                part = held.part if held is not None else None
                yield _Gathered(f"{name}/{key}", parameter.shape, kind, part, values)

    def load_optimizer_states(self, model: nn.Module, optimizer: Optimizer, saved: SavedTensors) -> None:
        for name, parameter in sorted(model.named_parameters()):
            held = held_of(parameter) if is_placed(parameter) else None
            if held is None or not held.is_stepped_here:
                continue
            for key in saved.keys_of(name):
                whole = saved[f"{name}/{key}"]
                if whole.shape == parameter.shape:
                    state = torch.zeros_like(held.local, dtype=whole.dtype, requires_grad=False)
                    held.values(state).copy_(held.cut(whole))
                else:
                    state = whole.to(held.local.device)
                optimizer.state[held.local][key] = state

    # ---- The memory behind a model -----------------------------------------------------------------------------

    def parameter_tensors(self, model: nn.Module) -> list[Tensor]:
        copies = copies_of(model)
        return [*(held.local.detach() for held in held_parts(model)), *(copies.rounded() if copies else ())]

    def main_copies(self, model: nn.Module) -> list[Tensor]:
        copies = copies_of(model)
        return [] if copies is None else copies.main()

    def gradient_tensors(self, model: nn.Module) -> list[Tensor]:
        return [held.local.grad for held in held_parts(model) if held.local.grad is not None]

    def drop_gradients(self, model: nn.Module) -> None:
        for held in held_parts(model):
            held.local.grad = None


def _typed(content: Tensor, start: int, item: _Gathered) -> Tensor:
    return content[start : start + item.shape.numel() * item.dtype.itemsize].view(item.dtype)


def _described(held: Held, value: Tensor) -> torch.dtype | Tensor:
    """Returns the type of a state that has its parameter's shape, or the value of another, such as a counter."""
    return value.dtype if value.shape == held.local.shape else value.detach().cpu()
