"""Where adapters are sent unmerged."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import DPOConfig, GRPOConfig, LoraConfig
from lightrl.config.adapters import sends_adapters


def config(how: Any = "auto", **options: Any) -> GRPOConfig:
    return GRPOConfig(lora=LoraConfig(rank=4, engine=how), **options)


def test_auto_sends_adapters_in_bfloat16_where_the_engine_takes_them() -> None:
    assert not sends_adapters(config())  # float32: merging loses nothing
    assert sends_adapters(config(dtype="bfloat16"))
    assert sends_adapters(config("unmerged"))
    assert not sends_adapters(config("merged", dtype="bfloat16"))
    assert not sends_adapters(config(dtype="bfloat16", engine="my_package:MyEngine"))
    assert not sends_adapters(config(dtype="bfloat16", rollout_ranks=1))
    assert not sends_adapters(config(dtype="bfloat16", engine="sglang"))  # by itself: it cannot take all layers
    assert sends_adapters(config("unmerged", engine="sglang"))


def test_a_trainer_without_an_engine_sends_nothing() -> None:
    assert not sends_adapters(DPOConfig(lora=LoraConfig(rank=4), dtype="bfloat16", train_data="x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_ranks": 1}, "--rollout_ranks 1"),
        ({"exact": True}, "--exact True"),
        ({"engine": "my_package:MyEngine"}, "--engine my_package:MyEngine"),
    ],
)
def test_unmerged_is_refused_where_it_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"--lora.engine unmerged does not go with {message}"):
        sends_adapters(config("unmerged", **options))


def test_the_option_needs_adapters() -> None:
    with pytest.raises(ValueError, match=r"--lora\.engine describe"):
        LoraConfig(engine="merged").check()
