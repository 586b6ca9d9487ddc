"""SGLang for a policy with LoRA adapters, which its own LoRA kernels apply beside the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from lightrl.engines.base import NamedTensors, skeleton
from lightrl.engines.sglang.adapted_loader import LOADER
from lightrl.engines.sglang.engine import SGLangEngine, build_sglang_engine
from lightrl.engines.sglang.sync import serialized
from lightrl.engines.weights.adapters import DOWN, UP, ArrivingAdapters, Factors, fits, layer_sizes
from lightrl.models.lora import largest_rank, lora_layers

_NAME = "policy"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
_MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the names that configs give it


class AdaptedSGLangEngine(SGLangEngine):
    """Writes the adapters of each weight sync over those before, and asks for them with every request."""

    loader = LOADER
    asked_for: ClassVar[Mapping[str, Any]] = {"lora_path": _NAME}

    def __init__(self, source: PreTrainedModel, *others: Any) -> None:
        names = [name for name, _ in lora_layers(source)]
        check_layers(source, names)
        self._sizes = layer_sizes(skeleton(source), names)
        self._rank = largest_rank(source)
        super().__init__(source, *others)

    def _defaults(self) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_loras_per_batch": 2,  # one is for requests without adapters; with fewer the other could be evicted
            "max_lora_rank": self._rank,
            "lora_target_modules": self._targets(),
            # The others are written in Triton, which needs a GPU.
            **({"lora_backend": "torch_native"} if self._device.type == "cpu" else {}),
        }

    def _targets(self) -> list[str]:
        return sorted({name.rpartition(".")[2] for name in self._sizes})

    def _make_ready(self) -> None:
        """Registers an adapter and uses it once, whereupon it has its memory."""
        from sglang.srt.managers import io_struct

        described = {"peft_type": "LORA", "r": self._rank, "lora_alpha": self._rank, "bias": "none"}
        adapter = io_struct.LoadLoRAAdapterFromTensorsReqInput(
            lora_name=_NAME,
            config_dict={**described, "target_modules": self._targets()},
            serialized_named_tensors=[serialized({}) for _ in range(self._group.size)],  # zeros
        )
        manager = self._owned.manager
        result = self._owned.run(manager.load_lora_adapter_from_tensors(adapter, None))
        if not result.success:
            raise RuntimeError(f"SGLang: {result.error_message}")
        request = io_struct.GenerateReqInput(
            input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0}, **self.asked_for
        )
        self._owned.run(manager.generate_request(request, None).__anext__())

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Sends the adapters, and all weights or none of them: after the first sync adapters may come alone."""
        self._require_loadable()
        arriving = ArrivingAdapters(self._sizes)
        plain = arriving.taken_from(weights)
        first = next(plain, None)
        if first is not None:
            super().load_weights(chain([first], plain), version)
        pairs = [pair for item in arriving.factors().items() for pair in self._fitting(*item, arriving)]
        problems = self._send(pairs, version)
        self._finish_load(arriving.account.problems() + problems, version)

    def _fitting(self, name: str, pair: Factors, arriving: ArrivingAdapters) -> NamedTensors:
        if fits(pair, *self._sizes[name]):
            return [(name + DOWN, pair.down), (name + UP, pair.up)]
        arriving.account.add_problem(f"misshapen adapter of {name}: got {[tuple(part.shape) for part in pair]}")
        return []


def check_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Raises ValueError for layers beside which SGLang puts no adapters, or puts them beside experts, too."""
    config: Any = model.config
    text = config.get_text_config()
    has_experts = any(getattr(text, name, None) for name in _NUMBERS_OF_EXPERTS)
    known = _ATTENTION if has_experts else _ATTENTION + _MLP
    unknown = sorted({name.rpartition(".")[2] for name in names} - set(known))
    if unknown:
        raise ValueError(
            f"--engine sglang applies adapters beside {', '.join(known)} of this model, not beside "
            f"{', '.join(unknown)}. Use --lora.engine merged, or leave these out of --lora.target_modules."
        )


def build_adapted_engine(*, others: Mapping[str, Any], **parts: Any) -> SGLangEngine:
    """Makes an SGLang engine that expects the adapters of the source."""
    if others:
        raise ValueError("SGLang takes no other adapters than the policy's yet: use the native engine.")
    return build_sglang_engine(kind=AdaptedSGLangEngine, **parts)
