"""SGLang for a policy with LoRA adapters, which SGLang's own LoRA kernels apply unmerged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from lightrl.config.adapters import BASE, POLICY
from lightrl.engines.base import NamedTensors, SamplingParams, skeleton
from lightrl.engines.sglang.adapted_loader import IN_USE, LOADER
from lightrl.engines.sglang.engine import SGLangEngine, build_sglang_engine
from lightrl.engines.sglang.sync import serialized
from lightrl.engines.weights.account import raise_problems
from lightrl.engines.weights.adapters import (
    DOWN,
    UP,
    ArrivingAdapters,
    Factors,
    label,
    layer_sizes,
    with_factors,
)
from lightrl.models.lora import largest_rank, lora_layers
from lightrl.models.saved_adapters import SavedAdapter

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
_MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # its names in configs


class AdaptedSGLangEngine(SGLangEngine):
    """Engine whose weight syncs overwrite the adapters in place, and whose requests each name an adapter."""

    loader = LOADER

    def __init__(self, source: PreTrainedModel, *parts: Any, others: Mapping[str, SavedAdapter]) -> None:
        """Takes `others`, the fixed adapters, by the names that requests use."""
        plain, own = skeleton(source), [name for name, _ in lora_layers(source)]
        check_layers(plain, own, "--lora.target_modules")
        for name, other in others.items():
            check_layers(plain, other.factors, f"--lora.others {name}")
        self._sizes = layer_sizes(plain, own)
        self._others = {
            label(name, layer): pair for name, other in others.items() for layer, pair in with_factors(other).items()
        }
        adapted = chain(own, *(other.factors for other in others.values()))
        self._targets = sorted({layer.rpartition(".")[2] for layer in adapted})
        self._rank = max([largest_rank(source), *(other.rank for other in others.values())])
        self.adapters = (POLICY, BASE, *others)
        super().__init__(source, *parts)
        try:
            self._make_room((POLICY, *others))
        except Exception:
            self.close()
            raise

    def _defaults(self) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_loras_per_batch": len(self.adapters),  # with fewer, one could be evicted
            "max_lora_rank": self._rank,
            "lora_target_modules": self._targets,
            # The other backends are written in Triton, which needs a GPU.
            **({"lora_backend": "torch_native"} if self._device.type == "cpu" else {}),
        }

    def _asked_for(self, params: SamplingParams) -> Mapping[str, Any]:
        return {} if params.adapter == BASE else {"lora_path": params.adapter}

    def _make_room(self, names: Iterable[str]) -> None:
        """Makes SGLang give each adapter its memory, and the schedulers note where that is."""
        for name in names:
            self._together(partial(self._use_once, name))
            raise_problems(self._send([(name + IN_USE, torch.zeros(1))], version=0), f"Making room for {name}")

    def _use_once(self, name: str) -> None:
        """Registers an adapter and asks for a token with it, after which it has its memory."""
        from sglang.srt.managers import io_struct

        # All with the same rank, filled up with zeros, since it sets the distance between parts of a fused layer.
        described = {"peft_type": "LORA", "r": self._rank, "lora_alpha": self._rank, "bias": "none"}
        adapter = io_struct.LoadLoRAAdapterFromTensorsReqInput(
            lora_name=name,
            config_dict={**described, "target_modules": self._targets},
            serialized_named_tensors=[serialized({}) for _ in range(self._group.size)],  # zeros
        )
        manager = self._owned.manager
        result = self._owned.run(manager.load_lora_adapter_from_tensors(adapter, None))
        if not result.success:
            raise RuntimeError(f"SGLang: {result.error_message}")
        request = io_struct.GenerateReqInput(
            input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0}, lora_path=name
        )
        self._owned.run(manager.generate_request(request, None).__anext__())
        self._owned.run(self._become_idle())

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Sends the adapters, with all weights or none of them: after the first sync, adapters may come alone."""
        self._require_loadable()
        arriving = ArrivingAdapters(self._sizes)
        plain = arriving.taken_from(weights)
        first = next(plain, None)
        pairs: list[tuple[str, Factors]] = []
        if first is not None:
            super().load_weights(chain([first], plain), version)
            pairs += self._others.items()
        pairs += arriving.factors().items()
        problems = self._send(_named(pairs), version)
        self._finish_load(arriving.account.problems() + problems, version)


def _named(pairs: Iterable[tuple[str, Factors]]) -> NamedTensors:
    for layer, pair in pairs:
        yield layer + DOWN, pair.down
        yield layer + UP, pair.up


def check_layers(model: Any, names: Iterable[str], option: str) -> None:
    """Raises ValueError for layers whose adapters SGLang cannot apply, or would also apply to experts.

    option: The option that named the layers.
    """
    text = model.config.get_text_config()
    has_experts = any(getattr(text, name, None) for name in _NUMBERS_OF_EXPERTS)
    known = _ATTENTION if has_experts else _ATTENTION + _MLP
    inside = set(model.get_decoder().modules())
    wrong = sorted(
        name for name in names if name.rpartition(".")[2] not in known or model.get_submodule(name) not in inside
    )
    if wrong:
        raise ValueError(
            f"{option}: --engine sglang applies adapters beside {', '.join(known)} of this language model, not beside "
            f"{wrong[0]} (such layers: {len(wrong)}). Leave these out, or use --lora.engine merged or another engine."
        )


def build_adapted_engine(*, others: Mapping[str, SavedAdapter], **parts: Any) -> SGLangEngine:
    """Makes an SGLang engine that expects the adapters of the source, and holds others."""
    return build_sglang_engine(kind=partial(AdaptedSGLangEngine, others=others), **parts)
