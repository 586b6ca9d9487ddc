"""LoRA adapters on their way into SGLang's scheduler processes, beside the weights (loader.py).

SGLang replaces an adapter by another only when no request uses it any more, and copies the new one at its first
request. Here its memory is written in place, as that of a weight is: requests under way go on, and what the kernels
read can be compared. This can go when SGLang replaces adapters in place (0.5.23: not yet):
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/lora/mem_pool.py
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/lora/layers.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.engines.sglang import loader
from lightrl.engines.weights.account import Place, is_held, sampled_indices
from lightrl.engines.weights.adapters import DOWN, UP, Factors, unwrapped
from lightrl.engines.weights.placement import Placement

LOADER = f"{__name__}.load_bucket"
_SLOT = 1  # of the only adapter in SGLang's pool; slot 0 is for requests without one

_came: dict[str, tuple[dict[str, Any], Tensor]] = {}  # descriptions and values of the factors, by name


def load_bucket(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Loads a bucket of weights, or of adapters, and reads everything back after the last."""
    with unwrapped(model) as wrappers:
        loader.load_bucket(model, named_tensors, AdapterSlots(wrappers, _came))


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The memory that SGLang's kernels read adapters from, and the factors that belong there."""

    wrappers: Mapping[str, Any]  # of the layers that may have an adapter
    came: dict[str, tuple[dict[str, Any], Tensor]]

    def begin(self) -> None:
        """Forgets the factors of a sync that failed."""
        self.came.clear()

    def take(self, item: dict[str, Any], tensor: Tensor) -> bool:
        """Keeps a factor until its partner is there."""
        is_factor = str(item["name"]).endswith((DOWN, UP))
        if is_factor:
            self.came[item["name"]] = item, tensor.clone()
        return is_factor

    @torch.no_grad()
    def finish(self, placement: Placement) -> list[str]:
        """Writes all factors and then reads them back; returns what is wrong."""
        if not self.came:
            return []
        spots = [spot for layer in self._layers() for spot in self._spots(layer, placement)]
        for slot in filter(None, map(_slot, self.wrappers.values())):
            for part in slot:
                part.zero_()  # an adapter of a lower rank than others leaves some of it as it is
        for name, held, place in spots:
            _copy(self.came[name][1], held, place)
        problems = self._missing(spots) + list(self._changed(spots)) + _wrong_scale(self.wrappers)
        self.came.clear()
        return problems

    def _layers(self) -> list[str]:
        return sorted(name.removesuffix(DOWN) for name in self.came if name.endswith(DOWN))

    def _spots(self, layer: str, placement: Placement) -> Iterator[tuple[str, Tensor, Place]]:
        """Yields (name, memory, place in it) for each part of an adapter's factors that this scheduler holds."""
        rank, inputs = self.came[layer + DOWN][0]["shape"]
        outputs = self.came[layer + UP][0]["shape"][0]
        places = placement.places(f"{layer}.weight", (outputs, inputs)) or []
        for place in places:
            slot = _slot(self.wrappers.get(place.parameter.removesuffix(".weight")))
            if slot is not None:
                yield layer + DOWN, slot.down, _down_place(place, placement.part_of(place) * slot.up.shape[1], rank)
                yield layer + UP, slot.up, _up_place(place, rank)

    def _missing(self, spots: list[tuple[str, Tensor, Place]]) -> list[str]:
        found = {name for name, _, _ in spots}
        return [
            f"SGLang has no place for the adapter of {layer}: use --lora.engine merged, or leave the layer out"
            for layer in self._layers()
            if layer + DOWN not in found
        ]

    def _changed(self, spots: list[tuple[str, Tensor, Place]]) -> Iterator[str]:
        for name in sorted({name for name, _, _ in spots}):
            item = self.came[name][0]
            shape = tuple(item["shape"])
            where, values = sampled_indices(shape), torch.tensor(item["values"], dtype=torch.float64)
            mine = [(held, place) for other, held, place in spots if other == name]
            if not all(is_held(held, place, shape, where, values) for held, place in mine):
                yield f"{name} is not held as it was given"


def _slot(wrapper: Any) -> Factors | None:
    """Returns the memory for a layer's adapter: [parts * largest rank, inputs] and [outputs, largest rank]."""
    down, up = getattr(wrapper, "lora_a", None), getattr(wrapper, "lora_b", None)
    return None if down is None or up is None else Factors(down[_SLOT], up[_SLOT])


def _down_place(weight: Place, start: int, rank: int) -> Place:
    columns = tuple(window for window in weight.held if window[0] == 1)
    return Place(weight.parameter, ((0, start, rank), *columns), tuple(item for item in weight.given if item[0] == 1))


def _up_place(weight: Place, rank: int) -> Place:
    rows = tuple(window for window in weight.held if window[0] == 0)
    return Place(weight.parameter, (*rows, (1, 0, rank)), tuple(item for item in weight.given if item[0] == 0))


def _copy(given: Tensor, held: Tensor, place: Place) -> None:
    for window in place.held:
        held = held.narrow(*window)
    for window in place.given:
        given = given.narrow(*window)
    held.copy_(given)


def _wrong_scale(wrappers: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the last batch: its requests must use the adapter, which has its scale in it."""
    backend = next(iter(wrappers.values())).lora_backend
    info = backend.get_batch_info()
    scale = 1.0 if info is None else float(info.scalings[_SLOT])
    return [] if scale == 1 else [f"SGLang's last batch multiplied the adapters by {scale:g}, not by 1"]
