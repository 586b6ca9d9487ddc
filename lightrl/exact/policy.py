"""The policy of a run with `--exact`, whose logprobs have the same bits as the engine's, and what serves it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightrl.exact.attention import TRAINER_ATTENTION
from lightrl.models.logprobs import LogitSteps
from lightrl.models.lora import adapter_of, lora_layers
from lightrl.models.packed_attention import ATTENTION_NAME
from lightrl.models.policy import Policy
from lightrl.strategy.base import StrategyBase


def make_exact(policy: Policy) -> None:
    """Gives a policy the attention and the head of the exact engine, which shares its other modules."""
    decoder = policy.hf.get_decoder()
    if decoder.config._attn_implementation != ATTENTION_NAME:
        raise ValueError(
            f"--exact True does not go with {type(policy.hf).__name__}: its attention takes no packs, so the engine "
            "computes it in another way. Use a model with plain attention, or leave --exact out."
        )
    decoder.set_attn_implementation(TRAINER_ATTENTION)
    policy.logits = LogitSteps(softcap=policy.logits.softcap, logit_scale=policy.logits.logit_scale)
    for _, layer in lora_layers(policy.hf):
        layer.forward = partial(merged_forward, layer)


def merged_forward(layer: Any, inputs: Tensor) -> Tensor:
    """Runs a layer with an adapter as the engine does: by first adding the adapter to the weight."""
    base = layer.base_layer
    adapter = adapter_of(layer)
    weight = base.weight if layer.disable_adapters else base.weight + adapter.delta(adapter.down, adapter.up)
    return F.linear(inputs, weight.T if adapter.is_transposed else weight, base.bias)


class ExactServing(StrategyBase):
    """Mixin for a strategy that makes its policies and its engine use the same arithmetic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serving.factories = {"native": "lightrl.exact.engine:build_exact_engine"}

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Makes a policy exact, then prepares it."""
        if isinstance(model, Policy):
            make_exact(model)
        return super().prepare_model(model)
