"""--native.lookup is refused with what needs another engine."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import GRPOConfig, LoraConfig
from lightrl.config.adapters import sends_adapters
from lightrl.config.native import NativeEngineConfig
from lightrl.config.strategy import RoutingConfig


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": "vllm"}, "engine vllm"),
        ({"exact": True}, "exact"),
        ({"top_k": 5}, "top_p and --top_k"),
        ({"routing": RoutingConfig(replay=True)}, "routing.replay"),
    ],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"--native.lookup does not go with --{name}: "):
        GRPOConfig(native=NativeEngineConfig(lookup=3), **options)


def test_adapters_are_merged_for_it() -> None:
    auto = GRPOConfig(dtype="bfloat16", lora=LoraConfig(rank=4))
    assert sends_adapters(auto)
    assert not sends_adapters(
        GRPOConfig(dtype="bfloat16", lora=LoraConfig(rank=4), native=NativeEngineConfig(lookup=3))
    )
    with pytest.raises(ValueError, match="--lora.engine unmerged does not go with --native.lookup True: "):
        GRPOConfig(lora=LoraConfig(rank=4, engine="unmerged"), native=NativeEngineConfig(lookup=3))
