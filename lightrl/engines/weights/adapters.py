"""LoRA adapters on their way to an engine: their names, and the factors that an engine applies beside a weight.

A factor is sent under the plain name of its layer: LAYER.lora_A.weight [rank, inputs], and LAYER.lora_B.weight
[outputs, rank], which includes the adapter's scale. So an engine adds B A x to a layer's output and needs no scale.
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
    """The factors of an adapter, which adds up @ down @ inputs to the output of a layer."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], scaled


def with_factors(other: SavedAdapter) -> dict[str, Factors]:
    """Returns the factors of a user's adapter, by layer."""
    return {layer: Factors(*pair) for layer, pair in other.factors.items()}


def label(adapter: str, layer: str) -> str:
    """Returns the name of a layer's adapter in errors, which for a user's adapter includes its own name."""
    return layer if adapter == POLICY else f"{adapter}:{layer}"


def adapter_and_layer(labelled: str) -> tuple[str, str]:
    """Returns the adapter and the layer from a label()."""
    adapter, _, layer = labelled.rpartition(":")
    return adapter or POLICY, layer


class ArrivingAdapters:
    """Collects the adapters of one weight sync from the stream of weights."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Takes the layer_sizes() of the layers whose adapters must arrive."""
        self._sizes = sizes
        self.account = WeightAccount({name + part: None for name in sorted(sizes) for part in (DOWN, UP)})
        self._arrived: dict[str, Tensor] = {}

    def taken_from(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yields the pairs that are not part of an adapter, and keeps the others."""
        for name, tensor in weights:
            if not name.endswith((DOWN, UP)):
                yield name, tensor
            elif self.account.accept(name, tensor):
                self._arrived[name] = tensor.detach()

    def factors(self) -> dict[str, Factors]:
        """Returns the adapters that arrived complete and fit their layers, by layer; one that does not is a problem."""
        found = {}
        for name, (inputs, outputs) in sorted(self._sizes.items()):
            down, up = self._arrived.get(name + DOWN), self._arrived.get(name + UP)
            if down is None or up is None:
                continue
            shapes = [tuple(down.shape), tuple(up.shape)]
            if shapes == [(len(down), inputs), (outputs, len(down))]:
                found[name] = Factors(down, up)
            else:
                self.account.add_problem(f"misshapen adapter of {name}: got {shapes}")
        return found

    def compare(self, name: str, given: Factors, held: Factors) -> None:
        """Records each factor of an adapter that the engine does not hold as it was given."""
        for part, wanted, found in zip((DOWN, UP), given, held, strict=True):
            if found.shape != wanted.shape or not torch.equal(found, wanted.to(found.device, found.dtype)):
                self.account.add_problem(f"the engine does not hold {name}{part} as it was given")


def cut_like(factors: Factors, places: Sequence[Place]) -> Factors:
    """Returns an adapter's slices for the parts of its layer's weight [outputs, inputs] at these places."""
    columns = [window for place in places[:1] for window in place.given if window[0] == 1]
    rows = [window for place in places for window in place.given if window[0] == 0]
    down = factors.down.narrow(*columns[0]) if columns else factors.down
    up = torch.cat([factors.up.narrow(*window) for window in rows]) if rows else factors.up
    return Factors(down, up)


def layer_sizes(model: nn.Module, layers: Iterable[str]) -> Mapping[str, tuple[int, int]]:
    """Yields (inputs, outputs) of linear layers by name."""
    sizes = {}
    for name in layers:
        layer: Any = model.get_submodule(name)
        shape = layer.weight.shape
        is_linear = isinstance(layer, nn.Linear)  # a Conv1D keeps its weight as [inputs, outputs]
        sizes[name] = (int(shape[1]), int(shape[0])) if is_linear else (int(shape[0]), int(shape[1]))
    return sizes


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[Mapping[str, Any]]:
    """Puts layers that a server has wrapped for adapters back in place, where its loader looks for them.

    Yields the wrappers by layer name.
    """
    wrappers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "set_lora")}
    try:
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper.base_layer)
        yield wrappers
    finally:
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper)
