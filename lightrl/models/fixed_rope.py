"""Fixes for the whole run the rotary frequencies that transformers would otherwise choose in every call.

Under `longrope` (Phi-3, MiniCPM) and `dynamic` rope, transformers chooses the frequencies of all tokens of a call by
its largest position. One long sequence would then change every short one in its pack, and the gradient would depend on
how a step is cut into micro-batches. Here the longest sequence that the run can have decides once and for all, for the
trainer and the engine alike.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXED = "fixed"  # the rope_type of a module whose frequencies no longer depend on the call

logger = logging.getLogger(__name__)


def fix_frequencies(model: nn.Module, longest: int | None = None) -> None:
    """Makes the model use, in all calls, the frequencies that transformers would use for the longest sequence.

    Args:
        model: a model from transformers, or its decoder; the frequencies may have been fixed before.
        longest: tokens of the longest sequence that the model will ever run. None: the length given before, or else
            the model's context.
    """
    rotary: Any  # an instance of one of many classes
    for rotary in model.modules():
        if hasattr(rotary, "rope_type") and hasattr(rotary, "config"):
            chosen = getattr(rotary, "fixed_rope", None) or _Choice(rotary)
            if chosen.kinds:
                rotary.fixed_rope = chosen
                chosen.apply(rotary, longest or chosen.longest)


def fixed_length(model: nn.Module) -> int | None:
    """Returns the length for which the frequencies were fixed; None if they do not vary or are not fixed."""
    choices: list[Any] = [module.fixed_rope for module in model.modules() if hasattr(module, "fixed_rope")]
    return int(choices[0].longest) if choices else None


def original_length(config: Any) -> int | None:
    """Returns the length up to which `longrope` uses its short factors; None for a model without them."""
    found = [rope["original_max_position_embeddings"] for rope in _ropes(config).values() if _kind(rope) == "longrope"]
    return int(found[0]) if found else None


def original_lengths(config: Any) -> list[int]:
    """Returns every length at which, according to the config, a rope changes."""
    named = [rope.get("original_max_position_embeddings") for rope in _ropes(config).values()]
    named.append(getattr(config.get_text_config(), "original_max_position_embeddings", None))
    return sorted({int(length) for length in named if length})


def extended_length(config: Any) -> int:
    """Returns the length to which YaRN extends a model, maybe beyond its `max_position_embeddings`; 0 without YaRN."""
    ropes = [rope for rope in _ropes(config).values() if _kind(rope) == "yarn" and rope.get("factor")]
    return max((int(rope["original_max_position_embeddings"] * rope["factor"]) for rope in ropes), default=0)


def describe_fixed(model: nn.Module) -> str:
    """Describes the fixed frequencies in words; empty for a model that has none."""
    longest = fixed_length(model)
    if longest is None:
        return ""
    return f"rotary frequencies are fixed for sequences of up to {longest} tokens, in trainer and engine alike"


class _Choice:
    """The frequencies of one rotary module before and after they were fixed."""

    def __init__(self, module: Any) -> None:
        self.config = module.config
        self.ropes = _ropes(self.config)
        self.kinds = {layer: _kind(rope) for layer, rope in self.ropes.items() if _varies(_kind(rope))}
        self.longest = int(self.config.max_position_embeddings)

    @torch.no_grad()
    def apply(self, module: Any, longest: int) -> None:
        """Writes the frequencies for this length into the module's buffers and stops transformers from changing them.

        A module with one kind of layer keeps the name of its rope in rope_type, one with several a dict of names.
        """
        self.longest = longest
        for layer, kind in self.kinds.items():
            prefix = f"{layer}_" if layer else ""
            frequencies: Tensor = getattr(module, f"{prefix}inv_freq")
            frequencies.copy_(self._frequencies(module, layer, kind, prefix, frequencies.device))
        if isinstance(module.rope_type, Mapping):
            module.rope_type = {**module.rope_type, **dict.fromkeys(self.kinds, FIXED)}
        else:
            module.rope_type = FIXED
        if "long_mscale" in self.ropes.get("", {}):
            self._fix_scale(module)

    def _frequencies(self, module: Any, layer: str, kind: str, prefix: str, device: torch.device) -> Tensor:
        original: Tensor = getattr(module, f"{prefix}original_inv_freq")
        if kind != "longrope" and self.longest <= self.config.max_position_embeddings:
            return original.to(device)
        keywords = {"layer_type": layer} if layer else {}
        frequencies: Tensor = ROPE_INIT_FUNCTIONS[kind](self.config, device, seq_len=self.longest, **keywords)[0]
        return frequencies

    def _fix_scale(self, module: Any) -> None:
        """Fixes also the scale of cosines and sines, which PhiMoE chooses by the length of the call.

        PhiMoE's module computes the frequencies anew in every call, always with the short factors:
        https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/phimoe/modeling_phimoe.py
        This can go when that module reads its inv_freq (5.19: not yet).
        """
        rope = self.ropes[""]
        is_long = self.longest > rope["original_max_position_embeddings"]
        module.config = copy.copy(self.config)
        module.config.rope_parameters = {**rope, "rope_type": "default"}
        module.rope_init_fn = _Constant(module, rope["long_mscale" if is_long else "short_mscale"])


class _Constant:
    """Stands in for the function that computes a rope from its config; returns fixed frequencies and a fixed scale."""

    def __init__(self, module: Any, scale: float) -> None:
        self._module, self._scale = module, scale

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, float]:
        return self._module.inv_freq, self._scale


def _ropes(config: Any) -> dict[str, Mapping[str, Any]]:
    """Returns the rope of each type of layer; the key "" stands for all layers of a model with a single rope."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return {"": parameters}
    return {layer: rope for layer, rope in parameters.items() if isinstance(rope, Mapping)}


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", "default"))


def _varies(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind
