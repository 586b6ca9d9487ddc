"""--native.share_weights is refused where trainer and engine cannot have the same weights in one memory."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import EvaluateConfig, GRPOConfig, LoraConfig, PPOConfig, RolloutConfig
from lightrl.config.native import NativeEngineConfig
from lightrl.config.strategy import RoutingConfig


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": "vllm"}, "engine vllm"),
        ({"strategy": "fsdp"}, "strategy fsdp"),
        ({"dtype": "bfloat16"}, "dtype bfloat16"),
        ({"engine_sleep_level": 2}, "engine_sleep_level 2"),
        ({"offload_while_generating": True}, "offload_while_generating"),
        ({"lora": LoraConfig(rank=4)}, "lora"),
        ({"exact": True}, "exact"),
        ({"top_k": 5}, "top_p and --top_k"),
        ({"routing": RoutingConfig(replay=True)}, "routing.replay"),
    ],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"--native.share_weights does not go with --{name}: "):
        GRPOConfig(native=NativeEngineConfig(share_weights=True), **{"strategy": "single", **options})


def test_it_does_not_go_with_guesses() -> None:
    with pytest.raises(ValueError, match=r"--native.share_weights does not go with --native.lookup: "):
        GRPOConfig(strategy="single", native=NativeEngineConfig(share_weights=True, lookup=2))


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig])
@pytest.mark.parametrize("strategy", ["single", "ddp", "my_package.module:MyStrategy"])
def test_strategies_that_keep_weights_whole_take_it(kind: type[RolloutConfig], strategy: str) -> None:
    assert kind(strategy=strategy, native=NativeEngineConfig(share_weights=True)).native.share_weights


def test_evaluation_takes_it() -> None:
    native = NativeEngineConfig(share_weights=True)
    assert EvaluateConfig(model="some/folder", eval_data="e.jsonl", strategy="single", native=native).native is native
