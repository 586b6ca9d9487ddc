"""LoRA adapters on their way to an engine: their names, and what an engine applies beside a weight.

A factor travels under the plain name of its layer: LAYER.lora_A.weight [rank, inputs], and LAYER.lora_B.weight
[outputs, rank] with the adapter's scale in it. So an engine adds B A x to a layer's output and knows no scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrl.config.adapters import POLICY
from lightrl.engines.base import NamedTensors
from lightrl.engines.weights.account import Place, WeightAccount
from lightrl.models.saved_adapters import SavedAdapter

DOWN, UP = ".lora_A.weight", ".lora_B.weight"


class Factors(NamedTuple):
    """What an adapter adds to the output of a layer: up @ down @ inputs."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], scaled


def with_factors(other: SavedAdapter) -> dict[str, Factors]:
    """Returns an adapter of the user by its layers."""
    return {layer: Factors(*pair) for layer, pair in other.factors.items()}


def label(adapter: str, layer: str) -> str:
    """Returns what errors call an adapter of a layer: adapters of the user with their names."""
    return layer if adapter == POLICY else f"{adapter}:{layer}"


def adapter_and_layer(labelled: str) -> tuple[str, str]:
    """Returns what label() was given."""
    adapter, _, layer = labelled.rpartition(":")
    return adapter or POLICY, layer


class ArrivingAdapters:
    """The adapters of one weight sync, taken out of the stream of weights."""

    def __init__(self, layers: Iterable[str]) -> None:
        """layers: the plain names of the layers whose adapters must come."""
        self._layers = sorted(layers)
        self.account = WeightAccount({name + part: None for name in self._layers for part in (DOWN, UP)})
        self._came: dict[str, Tensor] = {}

    def taken_from(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yields the pairs that belong to no adapter, and keeps the others."""
        for name, tensor in weights:
            if not name.endswith((DOWN, UP)):
                yield name, tensor
            elif self.account.accept(name, tensor):
                self._came[name] = tensor.detach()

    def factors(self) -> dict[str, Factors]:
        """Returns the adapters that came whole, by layer."""
        pairs = ((name, self._came.get(name + DOWN), self._came.get(name + UP)) for name in self._layers)
        return {name: Factors(down, up) for name, down, up in pairs if down is not None and up is not None}

    def compare(self, name: str, given: Factors, held: Factors) -> None:
        """Records each factor of an adapter that the engine does not hold as it was given."""
        for part, wanted, found in zip((DOWN, UP), given, held, strict=True):
            if found.shape != wanted.shape or not torch.equal(found, wanted.to(found.device, found.dtype)):
                self.account.add_problem(f"the engine does not hold {name}{part} as it was given")


def cut_like(factors: Factors, places: Sequence[Place]) -> Factors:
    """Returns the slices of an adapter beside the parts of its layer's weight [outputs, inputs] at these places."""
    columns = [window for place in places[:1] for window in place.given if window[0] == 1]
    rows = [window for place in places for window in place.given if window[0] == 0]
    down = factors.down.narrow(*columns[0]) if columns else factors.down
    up = torch.cat([factors.up.narrow(*window) for window in rows]) if rows else factors.up
    return Factors(down, up)


def fits(factors: Factors, inputs: int, outputs: int) -> bool:
    """Returns whether an adapter can stand beside a layer of this size."""
    rank = factors.down.shape[0]
    return tuple(factors.down.shape) == (rank, inputs) and tuple(factors.up.shape) == (outputs, rank)


def layer_sizes(model: nn.Module, layers: Iterable[str]) -> Mapping[str, tuple[int, int]]:
    """Returns (inputs, outputs) of linear layers by their names."""
    sizes = {}
    for name in layers:
        layer: Any = model.get_submodule(name)
        shape = layer.weight.shape
        is_linear = isinstance(layer, nn.Linear)  # a Conv1D keeps its weight as [inputs, outputs]
        sizes[name] = (int(shape[1]), int(shape[0])) if is_linear else (int(shape[0]), int(shape[1]))
    return sizes


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[Mapping[str, Any]]:
    """Puts layers that a server has wrapped for adapters back in their places, where its loader looks for them.

    Yields the wrappers by the names of the layers.
    """
    wrappers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "set_lora")}
    try:
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper.base_layer)
        yield wrappers
    finally:
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper)
