"""The layers of the native engine that apply adapters; tests/strategy/serving/ has the whole engine."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.testing import assert_close

from lightrl.engines.native.adapted import AdaptedLinear, factors_of
from lightrl.engines.native.row_adapters import NO_ADAPTER, ChosenAdapters, MixedRows
from lightrl.engines.weights.adapters import Factors


def adapter(layer: nn.Linear, rank: int, number: int = 0) -> Factors:
    factors = Factors(torch.randn(rank, layer.in_features), torch.randn(layer.out_features, rank))
    layer.adapter_factors = {**factors_of(layer), number: factors}  # type: ignore[assignment]
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
    held = factors_of(layer)[0]
    held.up.mul_(2)  # a view of what the product reads
    assert_close(fused(inputs), layer(inputs) + inputs @ held.down.T @ held.up.T)


@torch.no_grad()
def test_each_row_has_the_adapters_of_its_own_number_whatever_the_others_hold() -> None:
    layers, chosen = [nn.Linear(6, outputs) for outputs in (4, 2)], ChosenAdapters()
    fused, inputs = AdaptedLinear(layers, chosen=chosen), torch.randn(4, 6)
    policy, second = adapter(layers[0], 2), adapter(layers[0], 3, 2)
    third = adapter(layers[1], 1, 3)
    plain = fused(inputs)
    fused.refresh()
    wanted = plain.clone()
    wanted[0, :4] += second.up @ second.down @ inputs[0]
    wanted[2, :4] += policy.up @ policy.down @ inputs[2]
    wanted[3, 4:] += third.up @ third.down @ inputs[3]
    chosen.rows = MixedRows(np.array([2, NO_ADAPTER, 0, 3]), torch.device("cpu"))
    assert_close(fused(inputs), wanted)
    factors_of(layers[0])[2].down.fill_(float("inf"))  # an adapter that broke harms its own rows alone
    assert_close(fused(inputs)[1:], wanted[1:])
    for number, row in ((2, 0), (NO_ADAPTER, 1), (0, 2), (3, 3), (1, 1)):  # 1 has nothing beside these layers
        chosen.rows = number
        if number != 2:
            assert_close(fused(inputs)[row], wanted[row])
