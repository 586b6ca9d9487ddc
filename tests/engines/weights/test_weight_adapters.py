"""Adapters on their way to an engine."""

from __future__ import annotations

import torch
from torch import nn

from lightrl.engines.weights.account import Place
from lightrl.engines.weights.adapters import (
    ArrivingAdapters,
    Factors,
    adapter_and_layer,
    cut_like,
    label,
    layer_sizes,
    with_factors,
)
from lightrl.models.saved_adapters import SavedAdapter

DOWN, UP = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(4, 2)  # rank 2, 3 inputs, 4 outputs


def test_the_stream_is_divided_and_every_fault_is_named() -> None:
    arriving = ArrivingAdapters({"a": (3, 4), "b": (3, 4)})
    weights = [("w", UP), ("a.lora_A.weight", DOWN), ("a.lora_B.weight", UP), ("b.lora_B.weight", UP)]
    rest = list(arriving.taken_from([*weights, ("b.lora_B.weight", UP), ("c.lora_A.weight", DOWN)]))
    assert [name for name, _ in rest] == ["w"]
    assert list(arriving.factors()) == ["a"]
    assert arriving.account.problems() == [
        "b.lora_B.weight came twice",
        "unknown c.lora_A.weight",
        "missing b.lora_A.weight",
    ]


def test_what_an_engine_holds_is_compared_in_its_own_type() -> None:
    arriving, given = ArrivingAdapters({}), Factors(DOWN, UP)
    arriving.compare("a", given, Factors(DOWN.bfloat16(), UP.bfloat16()))
    assert not arriving.account.problems()
    arriving.compare("a", given, Factors(DOWN, 2 * UP))
    assert arriving.account.problems() == ["the engine does not hold a.lora_B.weight as it was given"]


def test_an_adapter_fits_a_layer_of_its_size() -> None:
    (size,) = layer_sizes(nn.Sequential(nn.Linear(3, 4)), ["0"]).values()
    assert size == (3, 4)
    for down, up in ((DOWN, UP), (DOWN, UP[:3]), (DOWN[:1], UP)):
        arriving = ArrivingAdapters({"0": size})
        assert not list(arriving.taken_from([("0.lora_A.weight", down), ("0.lora_B.weight", up)]))
        is_fit = down is DOWN and up is UP
        assert list(arriving.factors()) == (["0"] if is_fit else [])
        shapes = [tuple(down.shape), tuple(up.shape)]
        assert arriving.account.problems() == ([] if is_fit else [f"misshapen adapter of 0: got {shapes}"])


def test_an_adapter_is_cut_as_the_weight_beside_it() -> None:
    whole = Factors(DOWN, UP)
    assert cut_like(whole, [Place("w")]) == whole
    by_rows = cut_like(whole, [Place("w", ((0, 0, 1),), ((0, 1, 1),)), Place("w", ((0, 1, 1),), ((0, 3, 1),))])
    assert by_rows.down.equal(DOWN)
    assert by_rows.up.equal(UP[[1, 3]])
    by_columns = cut_like(whole, [Place("w", (), ((1, 2, 1),))])
    assert by_columns.down.equal(DOWN[:, 2:])
    assert by_columns.up.equal(UP)


def test_adapters_of_the_user_go_by_their_names() -> None:
    assert label("policy", "a.q_proj") == "a.q_proj"
    assert label("judge", "a.q_proj") == "judge:a.q_proj"
    for adapter in ("policy", "judge"):
        assert adapter_and_layer(label(adapter, "a.q_proj")) == (adapter, "a.q_proj")
    assert with_factors(SavedAdapter({"a": (DOWN, UP)})) == {"a": Factors(DOWN, UP)}
