"""Where adapters are sent unmerged."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import DPOConfig, GRPOConfig, LoraConfig, NativeEngineConfig
from lightrl.config.adapters import other_adapters, sends_adapters


def config(how: Any = "auto", **options: Any) -> GRPOConfig:
    return GRPOConfig(lora=LoraConfig(rank=4, engine=how), **options)


def test_auto_sends_adapters_in_bfloat16_where_the_engine_takes_them() -> None:
    assert not sends_adapters(config())  # float32: merging loses nothing
    assert sends_adapters(config(dtype="bfloat16"))
    assert sends_adapters(config("unmerged"))
    assert not sends_adapters(config("merged", dtype="bfloat16"))
    assert not sends_adapters(config(dtype="bfloat16", engine="my_package:MyEngine"))
    assert sends_adapters(config(dtype="bfloat16", rollout_ranks=1))
    assert not sends_adapters(config(dtype="bfloat16", engine="sglang"))  # by itself: it cannot take all layers
    assert sends_adapters(config("unmerged", engine="sglang"))


def test_a_trainer_without_an_engine_sends_nothing() -> None:
    assert not sends_adapters(DPOConfig(lora=LoraConfig(rank=4), dtype="bfloat16", train_data="x"))
    with pytest.raises(ValueError, match=r"--lora\.engine and --lora\.others need an engine, and this kind of run has"):
        DPOConfig(lora=LoraConfig(rank=4, engine="merged"), train_data="x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact": True}, "--exact True"),
        ({"native": NativeEngineConfig(lookup=1)}, "--native.lookup "),
        ({"top_p": 0.9}, r"--top_p 0.9: .* Leave one of them out\.$"),
        ({"top_k": 5}, "--top_k 5: "),
        ({"engine": "my_package:MyEngine"}, "--engine my_package:MyEngine: .* out, or use --engine native or vllm"),
    ],
)
def test_unmerged_is_refused_where_it_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"--lora.engine unmerged does not go with {message}"):
        config("unmerged", **options)


def test_the_option_needs_adapters() -> None:
    with pytest.raises(ValueError, match=r"--lora\.engine describe"):
        LoraConfig(engine="merged").check()


def others(*items: str, **options: Any) -> GRPOConfig:
    return GRPOConfig(lora=LoraConfig(rank=4, engine=options.pop("how", "unmerged"), others=items), **options)


def test_other_adapters_are_named_by_the_user() -> None:
    found = other_adapters(others("opponent=runs/old/final/adapter", "judge-2.b=a=b").lora)
    assert found == {"opponent": "runs/old/final/adapter", "judge-2.b": "a=b"}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (("opponent",), r"'opponent': it must be NAME=FOLDER"),
        (("opponent=",), "it must be NAME=FOLDER"),
        (("1st=a",), "it must be NAME=FOLDER"),
        (("my judge=a",), "it must be NAME=FOLDER"),
        (("policy=a",), "'policy' is the adapter that is trained"),
        (("base=a",), "'base' the model without one"),
        (("a=b", "a=c"), "a is given twice"),
    ],
)
def test_names_that_mean_something_else_are_refused(items: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        others(*items)


def test_other_adapters_need_an_engine_that_keeps_them_apart() -> None:
    with pytest.raises(ValueError, match=r"--lora\.others a=b needs --lora\.engine unmerged, not auto"):
        others("a=b", how="auto", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"--lora\.others stand beside an adapter that is trained"):
        GRPOConfig(lora=LoraConfig(others=("a=b",)))
    with pytest.raises(ValueError, match="this kind of run has none"):
        DPOConfig(lora=LoraConfig(rank=4, engine="unmerged", others=("a=b",)), train_data="x")
    for engine in ("native", "vllm", "sglang"):
        assert sends_adapters(GRPOConfig(engine=engine, lora=LoraConfig(path="x", engine="unmerged", others=("a=b",))))
    with pytest.raises(ValueError, match=r"use --engine native or vllm or sglang"):
        others("a=b", engine="my_package:MyEngine")
