"""vLLM for a policy with LoRA adapters, which are passed in vLLM's own LoRA requests."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lightrl.config.adapters import BASE, POLICY
from lightrl.engines.base import NamedTensors, SamplingParams, skeleton
from lightrl.engines.vllm.build import build_vllm_engine
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.engines.weights.account import raise_problems
from lightrl.engines.weights.adapters import (
    DOWN,
    UP,
    ArrivingAdapters,
    Factors,
    cut_like,
    label,
    layer_sizes,
    unwrapped,
    with_factors,
)
from lightrl.engines.weights.placement import Placement, ServerRules
from lightrl.models.lora import PEFT_PREFIX, largest_rank, lora_layers
from lightrl.models.saved_adapters import SavedAdapter

logger = logging.getLogger(__name__)

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the ranks for which vLLM can make room


class AdaptedVLLMEngine(VLLMEngine):
    """Engine that replaces vLLM's adapters at each weight sync, and gives each request the one that it names."""

    def __init__(self, arguments: Mapping[str, Any], *, others: Mapping[str, SavedAdapter], **settings: Any) -> None:
        """Takes `others`, the fixed adapters, by the names that requests use."""
        from vllm.lora.request import LoRARequest

        source = settings["source"]
        own, plain = [name for name, _ in lora_layers(source)], skeleton(source)
        self._sizes = layer_sizes(plain, own)
        self._others = {name: with_factors(other) for name, other in others.items()}
        if settings["device"].type == "cpu":
            self._others[BASE] = _nothing(self._sizes)
        self._all_sizes = layer_sizes(plain, sorted({*own, *chain.from_iterable(self._others.values())}))
        largest = max(largest_rank(source), *(other.rank for other in others.values()), 0)
        needed = {"max_loras": 1 + len(self._others), "max_lora_rank": room_of(largest)}
        _check_room(arguments, needed)
        super().__init__({"enable_lora": True, **needed, **arguments}, **settings)
        self.adapters = (POLICY, BASE, *others)
        self._requests: dict[str, LoRARequest] = {}
        for number, name in enumerate((POLICY, *self._others), start=1):  # vLLM's own numbers; 0 means no adapter
            folder = Path(self._scratch.name) / f"adapter-{number}"
            folder.mkdir()
            self._requests[name] = LoRARequest(name, number, str(folder))
        self._has_told = False  # whether the adapters that are not read back were logged

    def _asked_for(self, params: SamplingParams) -> Mapping[str, Any]:
        request = self._requests.get(params.adapter)
        return {} if request is None else {"lora_request": request}

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Loads the adapters, with all weights or none of them: after the first sync, adapters may come alone."""
        self._require_open("load_weights")
        if "weights" in self._asleep:
            raise RuntimeError("load_weights() while the weights sleep: call wake('weights') first.")
        arriving = ArrivingAdapters(self._sizes)
        plain = arriving.taken_from(weights)
        first = next(plain, None)
        if first is not None:
            super().load_weights(chain([first], plain), version)
            for name, factors in self._others.items():
                self._give(factors, name)
        given = arriving.factors()
        if not arriving.account.problems():
            self._give(given)
            self._read_back(arriving, given)
        if first is None:
            self._finish_load(version)
        raise_problems(arriving.account.problems(), f"Weight sync to version {version}")

    def _deliver(self, model: nn.Module, weights: NamedTensors) -> list[str]:
        with unwrapped(model):
            return super()._deliver(model, weights)

    def _give(self, factors: Mapping[str, Factors], name: str = POLICY) -> None:
        """Makes vLLM read an adapter from a folder, as for users' adapters; each rank has its own folders."""
        request = self._requests[name]
        tensors = {}
        for layer, pair in factors.items():
            for part, tensor in zip((DOWN, UP), pair, strict=True):
                tensors[PEFT_PREFIX + layer + part] = tensor.detach().cpu().contiguous()
        save_file(tensors, Path(request.lora_path) / "adapter_model.safetensors")
        rank = max(pair.down.shape[0] for pair in factors.values())
        described = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,  # so that vLLM multiplies by 1, as the second factor includes the scale
            "target_modules": sorted({layer.rpartition(".")[2] for layer in factors}),
            "bias": "none",
        }
        (Path(request.lora_path) / "adapter_config.json").write_text(json.dumps(described))
        self._engine.remove_lora(request.lora_int_id)
        self._engine.add_lora(request)

    def _read_back(self, arriving: ArrivingAdapters, given: Mapping[str, Factors]) -> None:
        """Compares all adapters, or this rank's slices of them, in the memory that vLLM's kernels read."""
        (held,) = self._llm.apply_model(lambda model: list(self._held(model, {POLICY: given, **self._others})))
        unread = []
        for name, wanted, pair in held:
            if pair is None:
                arriving.account.add_problem(
                    f"vLLM has no place for the adapter of {name}: use --lora.engine merged, or leave the layer out"
                )
            elif wanted is None:
                unread.append(name)
            else:
                arriving.compare(name, wanted, pair)
        if unread and not self._has_told:
            logger.info("vLLM cuts %d adapters in a way that is not read back: %s", len(unread), unread)
            self._has_told = True

    def _held(
        self, model: Any, given: Mapping[str, Mapping[str, Factors]]
    ) -> Iterator[tuple[str, Factors | None, Factors | None]]:
        """Yields this rank's expected part of each adapter (None: unknown) and the part that it holds (None: none)."""
        with unwrapped(model):  # inside, the weights have their plain names
            placement = Placement(model, ServerRules(), tp_rank=self._group.rank, tp_size=self._group.size)
        is_whole = self._group.size == 1
        for adapter, factors in given.items():
            number = self._requests[adapter].lora_int_id
            for layer, pair in factors.items():
                inputs, outputs = self._all_sizes[layer]
                places = placement.places(f"{layer}.weight", (outputs, inputs))
                wanted = pair if is_whole else cut_like(pair, places) if places else None
                slot = _slot(model, placement.own_name(f"{layer}.weight").removesuffix(".weight"), number)
                if wanted is not None and slot is not None:
                    wanted = _cut_to(slot, wanted, self._group.rank)
                yield label(adapter, layer), wanted, None if slot is None else _filled(slot, wanted or pair)


def _nothing(sizes: Mapping[str, tuple[int, int]]) -> dict[str, Factors]:
    """Returns an adapter that adds zeros, with which vLLM on a CPU computes the model without an adapter.

    In a batch with adapters, a request without one reads place -1 there, which is the last adapter's. This can go
    when place -1 is masked, as it is on a GPU (0.32: not yet):
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/lora/ops/torch_ops/lora_ops.py
    """
    return {
        layer: Factors(torch.zeros(1, inputs), torch.zeros(outputs, 1)) for layer, (inputs, outputs) in sizes.items()
    }


def room_of(largest: int) -> int:
    """Returns the rank for which vLLM must make room, given the largest rank of any adapter."""
    room = next((room for room in _RANKS if room >= largest), None)
    if room is None:
        raise ValueError(f"vLLM takes adapters of rank {_RANKS[-1]} at most, not {largest}.")
    return room


def _check_room(arguments: Mapping[str, Any], needed: Mapping[str, int]) -> None:
    """Raises ValueError for --engine_args with which vLLM would keep evicting adapters, or refuse a rank."""
    for name, least in needed.items():
        if int(arguments.get(name, least)) < least:
            raise ValueError(f"--engine_args {name}={arguments[name]}: the adapters of the run need {least} or more.")


def _slot(model: Any, own: str, number: int) -> Factors | None:
    """Returns the padded memory for an adapter of a layer; None if vLLM has none for the layer."""
    manager = model.lora_manager
    parts = {part: (fused, i) for fused, each in manager.packed_modules_mapping.items() for i, part in enumerate(each)}
    parent, _, last = own.rpartition(".")
    fused, index = parts.get(last, (last, 0))
    layer = manager.modules.get(own) or manager.modules.get(f"{parent}.{fused}")
    if layer is None or index >= len(layer.lora_a_stacked) or number not in manager.lora_index_to_id:
        return None
    slot = manager.lora_index_to_id.index(number)
    return Factors(layer.lora_a_stacked[index][slot, 0], layer.lora_b_stacked[index][slot, 0])


def _cut_to(slot: Factors, factors: Factors, rank: int) -> Factors:
    """Returns the part of factors in a rank's slot, even if fully_sharded_loras cuts both of them."""
    (part, _), (outputs, room) = slot.down.shape, slot.up.shape
    down = factors.down[rank * part :][:part] if part < room else factors.down
    up = factors.up[rank * outputs :][:outputs] if outputs < factors.up.shape[0] else factors.up
    return Factors(down, up)


def _filled(slot: Factors, wanted: Factors) -> Factors:
    """Returns the part of a slot that an adapter fills."""
    down, up = (held[: part.shape[0], : part.shape[1]] for held, part in zip(slot, wanted, strict=True))
    return Factors(down, up)


def build_adapted_engine(*, others: Mapping[str, SavedAdapter], **parts: Any) -> VLLMEngine:
    """Makes a vLLM engine that expects the adapters of the source, and holds others."""
    return build_vllm_engine(kind=partial(AdaptedVLLMEngine, others=others), **parts)
