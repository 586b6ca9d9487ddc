"""--rollout.keep_cache is refused where no sample goes on, and with what cannot put keys and values back."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import GRPOConfig, LoraConfig, WorkflowConfig
from lightrl.config.adapters import sends_adapters
from lightrl.config.kept_cache import KEEPING_ENGINE
from lightrl.config.native import NativeEngineConfig
from lightrl.config.strategy import RoutingConfig

KEEPS: dict[str, Any] = {"over_issue": 0.5, "max_staleness": 3, "keep_cache": True}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": "vllm"}, "engine vllm: only the native engine"),
        ({"engine": "sglang"}, "engine sglang: only the native engine"),
        ({"engine_tp_size": 2}, "engine_tp_size"),
        ({"rollout_ranks": 1}, "rollout_ranks"),
        ({"routing": RoutingConfig(replay=True)}, "routing.replay"),
        ({"native": NativeEngineConfig(lookup=3)}, "native.lookup"),
        ({"rollout": WorkflowConfig(**KEEPS, partial=False)}, "rollout.partial False"),
    ],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"--rollout.keep_cache does not go with --{name}"):
        GRPOConfig(**{"rollout": WorkflowConfig(**KEEPS), **options})


def test_an_exact_run_refuses_it() -> None:
    with pytest.raises(ValueError, match="exact True"):
        GRPOConfig(rollout=WorkflowConfig(**KEEPS), exact=True)


def test_it_does_nothing_where_no_sample_goes_on() -> None:
    with pytest.raises(ValueError, match="--rollout.keep_cache does nothing without --rollout.over_issue"):
        GRPOConfig(rollout=WorkflowConfig(max_staleness=3, keep_cache=True))


def test_it_asks_for_the_engine_that_keeps_rows() -> None:
    assert GRPOConfig(rollout=WorkflowConfig(over_issue=0.5, max_staleness=3)).engine_path == "native"
    assert GRPOConfig(rollout=WorkflowConfig(**KEEPS)).engine_path == KEEPING_ENGINE


def test_adapters_are_merged_for_it() -> None:
    lora = LoraConfig(rank=4)
    assert sends_adapters(GRPOConfig(dtype="bfloat16", lora=lora))
    assert not sends_adapters(GRPOConfig(dtype="bfloat16", lora=lora, rollout=WorkflowConfig(**KEEPS)))
    with pytest.raises(ValueError, match="--lora.engine unmerged does not go with --rollout.keep_cache True: "):
        GRPOConfig(lora=LoraConfig(rank=4, engine="unmerged"), rollout=WorkflowConfig(**KEEPS))
