"""The layers of the native engine that apply adapters; tests/strategy/serving/ has the whole engine."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing import assert_close

from lightrl.engines.native.adapted import AdaptedLinear
from lightrl.engines.weights.adapters import Factors


def adapter(layer: nn.Linear, rank: int) -> Factors:
    factors = Factors(torch.randn(rank, layer.in_features), torch.randn(layer.out_features, rank))
    layer.adapter_factors = factors  # type: ignore[assignment]
    return factors


@torch.no_grad()
def test_fused_layers_add_their_own_adapters_alone() -> None:
    layers = [nn.Linear(6, outputs) for outputs in (4, 2, 3)]
    fused, inputs = AdaptedLinear(layers), torch.randn(5, 6)
    assert_close(fused(inputs), torch.cat([layer(inputs) for layer in layers], 1))
    first, last = adapter(layers[0], 2), adapter(layers[2], 3)  # the second layer has none
    fused.refresh()
    wanted = [layer(inputs) for layer in layers]
    wanted[0] += inputs @ first.down.T @ first.up.T
    wanted[2] += inputs @ last.down.T @ last.up.T
    assert_close(fused(inputs), torch.cat(wanted, 1))


@torch.no_grad()
def test_what_is_copied_into_an_adapter_is_used_at_once() -> None:
    layer = nn.Linear(6, 4)
    fused, inputs = AdaptedLinear([layer]), torch.randn(5, 6)
    adapter(layer, 2)
    fused.refresh()
    held: Factors = layer.adapter_factors  # type: ignore[assignment]
    held.up.mul_(2)  # a view of what the product reads
    assert_close(fused(inputs), layer(inputs) + inputs @ held.down.T @ held.up.T)
