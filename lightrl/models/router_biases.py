"""Keeps the biases that a router adds to its scores in float32: bfloat16 would make most of 10 +- 0.04 equal.

transformers holds most of them as buffers, which lightrl leaves as they are. AFMoE, ERNIE 4.5 MoE and Laguna hold them
as parameters, which nothing trains: they get no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ENDINGS = (".e_score_correction_bias", ".expert_bias")


def is_router_bias(name: str) -> bool:
    """Returns whether a parameter or buffer of this name stays in float32 in a model that computes in bfloat16."""
    return name.endswith(_ENDINGS)


def router_biases(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns a model's router biases that are parameters, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if is_router_bias(name)}


def hold_in_float32(model: nn.Module) -> None:
    """Converts the router biases of a model, parameters or buffers, to float32."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_router_bias(name):
            tensor.data = tensor.data.float()


def as_sent(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a weight as a sync sends it: in `dtype`, except router biases and integers. None changes nothing."""
    if dtype in (None, tensor.dtype) or not tensor.is_floating_point() or is_router_bias(name):
        return tensor
    return tensor.to(dtype)
