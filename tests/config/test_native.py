"""Each option --native.* is refused with what needs another engine."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import EvaluateConfig, GRPOConfig, LoraConfig, PPOConfig, RolloutConfig
from lightrl.config.adapters import sends_adapters
from lightrl.config.native import NativeEngineConfig
from lightrl.config.strategy import RoutingConfig


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": "vllm"}, "engine vllm"),
        ({"exact": True}, "exact"),
        ({"native": NativeEngineConfig(cpu_kernels=True, lookup=3)}, "native.lookup"),
        ({"routing": RoutingConfig(replay=True)}, "routing.replay"),
    ],
)
def test_what_kernels_do_not_go_with_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"--native.cpu_kernels does not go with --{name}: "):
        GRPOConfig(**{"native": NativeEngineConfig(cpu_kernels=True), **options})


def test_a_missing_compiler_is_noticed_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ValueError, match="--native.cpu_kernels True: A C compiler is needed: CC is 'no-such-compiler'"):
        GRPOConfig(native=NativeEngineConfig(cpu_kernels=True))
    assert GRPOConfig().native == NativeEngineConfig()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": "vllm"}, "engine vllm"),
        ({"exact": True}, "exact"),
        ({"top_k": 5}, "top_p and --top_k"),
        ({"routing": RoutingConfig(replay=True)}, "routing.replay"),
    ],
)
def test_what_guesses_do_not_go_with_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"--native.lookup does not go with --{name}: "):
        GRPOConfig(native=NativeEngineConfig(lookup=3), **options)


def test_adapters_are_merged_for_guesses() -> None:
    auto = GRPOConfig(dtype="bfloat16", lora=LoraConfig(rank=4))
    assert sends_adapters(auto)
    assert not sends_adapters(
        GRPOConfig(dtype="bfloat16", lora=LoraConfig(rank=4), native=NativeEngineConfig(lookup=3))
    )
    with pytest.raises(ValueError, match="--lora.engine unmerged does not go with --native.lookup True: "):
        GRPOConfig(lora=LoraConfig(rank=4, engine="unmerged"), native=NativeEngineConfig(lookup=3))


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
def test_what_lent_weights_do_not_go_with_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"--native.share_weights does not go with --{name}: "):
        GRPOConfig(native=NativeEngineConfig(share_weights=True), **{"strategy": "single", **options})


def test_lent_weights_do_not_go_with_guesses() -> None:
    with pytest.raises(ValueError, match=r"--native.share_weights does not go with --native.lookup: "):
        GRPOConfig(strategy="single", native=NativeEngineConfig(share_weights=True, lookup=2))


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig])
@pytest.mark.parametrize("strategy", ["single", "ddp", "my_package.module:MyStrategy"])
def test_strategies_that_keep_weights_whole_lend_them(kind: type[RolloutConfig], strategy: str) -> None:
    assert kind(strategy=strategy, native=NativeEngineConfig(share_weights=True)).native.share_weights


def test_an_evaluation_may_lend_its_weights() -> None:
    native = NativeEngineConfig(share_weights=True)
    assert EvaluateConfig(model="some/folder", eval_data="e.jsonl", strategy="single", native=native).native is native
