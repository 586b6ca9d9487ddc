"""Loads LoRA adapters into SGLang's scheduler processes, beside the weights (loader.py).

SGLang replaces an adapter only when no request uses it any more, and copies the new one at its first request. Here its
memory is overwritten in place, like that of a weight: unfinished requests go on, and what the kernels read can be
compared. This can go when SGLang replaces adapters in place (0.5.23: not yet):
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/lora/mem_pool.py
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/lora/layers.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.config.adapters import POLICY
from lightrl.engines.sglang import loader
from lightrl.engines.weights.account import Place, is_held, sampled_indices
from lightrl.engines.weights.adapters import DOWN, UP, Factors, adapter_and_layer, unwrapped
from lightrl.engines.weights.placement import Placement

LOADER = f"{__name__}.load_bucket"
IN_USE = ".in_use"  # suffix of a tensor that only tells which adapter the last batch used


@dataclass(slots=True)
class Adapters:
    """The adapters that a scheduler keeps in mind from one call to the next."""

    slots: dict[str, int] = field(default_factory=dict)  # in SGLang's pool, by adapter
    came: dict[str, Tensor] = field(default_factory=dict)  # factors of the current sync
    described: dict[str, dict[str, Any]] = field(default_factory=dict)  # all factors that must be held

    def begin(self) -> None:
        """Drops the factors of a failed sync, and those that every sync brings."""
        self.came.clear()
        self.described = {name: item for name, item in self.described.items() if _adapter(name) != POLICY}


_adapters = Adapters()


def load_bucket(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Loads a bucket of weights or adapters; after the last bucket, reads everything back."""
    with unwrapped(model) as wrappers:
        loader.load_bucket(model, named_tensors, AdapterSlots(wrappers, _adapters))


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The memory from which SGLang's kernels read adapters, and the factors that belong there."""

    wrappers: Mapping[str, Any]  # the layers that may have an adapter
    adapters: Adapters

    def begin(self) -> None:
        """Starts a sync; called before its first bucket."""
        self.adapters.begin()

    def take(self, item: dict[str, Any], tensor: Tensor) -> bool:
        """Keeps a factor until its partner has arrived."""
        name = str(item["name"])
        if name.endswith(IN_USE):
            self.adapters.slots[name.removesuffix(IN_USE)] = int(self._last_batch().weight_indices[0])
            return True
        is_factor = name.endswith((DOWN, UP))
        if is_factor:
            self.adapters.came[name], self.adapters.described[name] = tensor.clone(), item
        return is_factor

    @torch.no_grad()
    def finish(self, placement: Placement) -> list[str]:
        """Writes the factors that arrived, then reads back all that must be held; returns the problems."""
        came = self.adapters.came
        if not came:
            return []
        spots = [spot for layer in self._layers() for spot in self._spots(layer, placement)]
        for slot in self._slots({_adapter(name) for name in came}):
            for part in slot:
                part.zero_()  # an adapter of a lower rank or with fewer layers would leave some of it unchanged
        for name, held, place in spots:
            if name in came:
                _copy(came[name], held, place)
        problems = self._missing(spots) + list(self._changed(spots)) + list(self._wrong_scales())
        came.clear()
        return problems

    def _layers(self) -> list[str]:
        return sorted(name.removesuffix(DOWN) for name in self.adapters.described if name.endswith(DOWN))

    def _slots(self, adapters: Collection[str]) -> Iterator[Factors]:
        for wrapper in self.wrappers.values():
            yield from filter(None, (_slot(wrapper, self.adapters.slots[name]) for name in adapters))

    def _spots(self, labelled: str, placement: Placement) -> Iterator[tuple[str, Tensor, Place]]:
        """Yields (name, memory, index in it) for each part of an adapter's factors that this scheduler holds."""
        adapter, layer = adapter_and_layer(labelled)
        rank, inputs = self.adapters.described[labelled + DOWN]["shape"]
        outputs = self.adapters.described[labelled + UP]["shape"][0]
        places = placement.places(f"{layer}.weight", (outputs, inputs)) or []
        for place in places:
            wrapper = self.wrappers.get(place.parameter.removesuffix(".weight"))
            slot = _slot(wrapper, self.adapters.slots[adapter])
            if slot is not None:
                start = placement.part_of(place) * slot.up.shape[1]
                yield labelled + DOWN, slot.down, _down_place(place, start, rank)
                yield labelled + UP, slot.up, _up_place(place, rank)

    def _missing(self, spots: list[tuple[str, Tensor, Place]]) -> list[str]:
        found = {name for name, _, _ in spots}
        return [
            f"SGLang has no place for the adapter of {layer}: use --lora.engine merged, or leave the layer out"
            for layer in self._layers()
            if layer + DOWN not in found
        ]

    def _changed(self, spots: list[tuple[str, Tensor, Place]]) -> Iterator[str]:
        for name in sorted({name for name, _, _ in spots}):
            item = self.adapters.described[name]
            shape = tuple(item["shape"])
            where, values = sampled_indices(shape), torch.tensor(item["values"], dtype=torch.float64)
            mine = [(held, place) for other, held, place in spots if other == name]
            if not all(is_held(held, place, shape, where, values) for held, place in mine):
                yield f"{name} is not held as it was given"

    def _wrong_scales(self) -> Iterator[str]:
        """Yields problems of the last batch's scales, which must be 1: adapters already include their scale."""
        info = self._last_batch()
        for name, slot in self.adapters.slots.items() if info is not None else ():
            if info.lora_ranks[slot] and info.scalings[slot] != 1:  # both are 0 if no request used the adapter
                yield f"SGLang's last batch multiplied the adapter {name} by {float(info.scalings[slot]):g}, not by 1"

    def _last_batch(self) -> Any:
        return next(iter(self.wrappers.values())).lora_backend.get_batch_info()


def _adapter(factor: str) -> str:
    return adapter_and_layer(factor)[0]


def _slot(wrapper: Any, number: int) -> Factors | None:
    """Returns the memory for a layer's adapter: [parts * largest rank, inputs] and [outputs, largest rank]."""
    down, up = getattr(wrapper, "lora_a", None), getattr(wrapper, "lora_b", None)
    return None if down is None or up is None else Factors(down[number], up[number])


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
