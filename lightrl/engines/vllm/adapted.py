"""vLLM for a policy with LoRA adapters, which go through vLLM's own LoRA requests."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from lightrl.engines.base import NamedTensors, skeleton
from lightrl.engines.vllm.build import build_vllm_engine
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.engines.weights.account import raise_problems
from lightrl.engines.weights.adapters import DOWN, UP, ArrivingAdapters, Factors, cut_like, fits, layer_sizes, unwrapped
from lightrl.engines.weights.placement import Placement, ServerRules
from lightrl.models.lora import largest_rank, lora_layers

logger = logging.getLogger(__name__)

_NAME, _ID = "policy", 1
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM makes room for one of these
_PREFIX = "base_model.model."  # before every name in an adapter's file


class AdaptedVLLMEngine(VLLMEngine):
    """Gives vLLM the adapters of each weight sync in place of those before, and asks for them with every request."""

    def __init__(self, arguments: Mapping[str, Any], **settings: Any) -> None:
        from vllm.lora.request import LoRARequest

        source = settings["source"]
        self._sizes = layer_sizes(skeleton(source), [name for name, _ in lora_layers(source)])
        self._rank = largest_rank(source)
        room = next((rank for rank in _RANKS if rank >= self._rank), None)
        if room is None:
            raise ValueError(f"vLLM takes adapters of rank {_RANKS[-1]} at most, not {self._rank}.")
        super().__init__({"enable_lora": True, "max_loras": 1, "max_lora_rank": room, **arguments}, **settings)
        self._folder = Path(self._scratch.name) / "adapter"
        self._folder.mkdir()
        self._has_told = False  # which adapters are not read back
        self._asked_for = {"lora_request": LoRARequest(_NAME, _ID, str(self._folder))}

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Takes the adapters, and all weights or none of them: after the first sync adapters may come alone."""
        self._require_open("load_weights")
        if "weights" in self._asleep:
            raise RuntimeError("load_weights() while the weights sleep: call wake('weights') first.")
        arriving = ArrivingAdapters(self._sizes)
        plain = arriving.taken_from(weights)
        first = next(plain, None)
        if first is not None:
            super().load_weights(chain([first], plain), version)
        given = arriving.factors()
        for name, pair in given.items():
            if not fits(pair, *self._sizes[name]):
                arriving.account.add_problem(f"misshapen adapter of {name}: got {[tuple(part.shape) for part in pair]}")
        if not arriving.account.problems():
            self._give(given)
            self._read_back(arriving, given)
        if first is None:
            self._finish_load(version)
        raise_problems(arriving.account.problems(), f"Weight sync to version {version}")

    def _deliver(self, model: nn.Module, weights: NamedTensors) -> list[str]:
        with unwrapped(model):
            return super()._deliver(model, weights)

    def _give(self, adapters: Mapping[str, Factors]) -> None:
        """Has vLLM read the adapters from a folder, as it does those of users; each rank has a folder of its own."""
        tensors = {}
        for name, pair in adapters.items():
            for part, tensor in zip((DOWN, UP), pair, strict=True):
                tensors[_PREFIX + name + part] = tensor.detach().cpu().contiguous()
        save_file(tensors, self._folder / "adapter_model.safetensors")
        described = {
            "peft_type": "LORA",
            "r": self._rank,
            "lora_alpha": self._rank,  # so that vLLM multiplies by 1: the scale is in the second factor
            "target_modules": sorted({name.rpartition(".")[2] for name in adapters}),
            "bias": "none",
        }
        (self._folder / "adapter_config.json").write_text(json.dumps(described))
        self._engine.remove_lora(_ID)
        self._engine.add_lora(self._asked_for["lora_request"])

    def _read_back(self, arriving: ArrivingAdapters, given: Mapping[str, Factors]) -> None:
        """Compares the adapters in the memory that vLLM's kernels read, and of those it has cut this rank's slices."""
        (held,) = self._llm.apply_model(lambda model: list(self._held(model, given)))
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

    def _held(self, model: Any, given: Mapping[str, Factors]) -> Iterator[tuple[str, Factors | None, Factors | None]]:
        """Yields what this rank should hold of each adapter, None if not known, and what it does, None if nothing."""
        with unwrapped(model):  # the weights have their own names
            placement = Placement(model, ServerRules(), tp_rank=self._group.rank, tp_size=self._group.size)
        is_whole = self._group.size == 1
        is_cut_otherwise = model.lora_manager.lora_config.fully_sharded_loras  # along the rank, too
        for name, pair in given.items():
            inputs, outputs = self._sizes[name]
            places = placement.places(f"{name}.weight", (outputs, inputs))
            wanted = pair if is_whole else cut_like(pair, places) if places and not is_cut_otherwise else None
            slot = _slot(model, placement.own_name(f"{name}.weight").removesuffix(".weight"))
            yield name, wanted, None if slot is None else _filled(slot, wanted or pair)


def _slot(model: Any, own: str) -> Factors | None:
    """Returns the memory for the adapter of a layer, padded; None for a layer that vLLM has none of."""
    manager = model.lora_manager
    parts = {part: (fused, i) for fused, each in manager.packed_modules_mapping.items() for i, part in enumerate(each)}
    parent, _, last = own.rpartition(".")
    fused, index = parts.get(last, (last, 0))
    layer = manager.modules.get(own) or manager.modules.get(f"{parent}.{fused}")
    if layer is None or index >= len(layer.lora_a_stacked):
        return None
    slot = manager.lora_index_to_id.index(_ID)
    return Factors(layer.lora_a_stacked[index][slot, 0], layer.lora_b_stacked[index][slot, 0])


def _filled(slot: Factors, wanted: Factors) -> Factors:
    """Returns the part of a slot that an adapter fills."""
    rank, inputs = wanted.down.shape
    return Factors(slot.down[:rank, :inputs], slot.up[: wanted.up.shape[0], :rank])


def build_adapted_engine(*, others: Mapping[str, Any], **parts: Any) -> VLLMEngine:
    """Makes a vLLM engine that expects the adapters of the source."""
    if others:
        raise ValueError("vLLM takes no other adapters than the policy's yet: use the native engine.")
    return build_vllm_engine(kind=AdaptedVLLMEngine, **parts)
