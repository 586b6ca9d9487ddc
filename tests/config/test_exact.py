"""`--exact` refuses what cannot be exact, with the reason, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import AlgorithmConfig, FSDPConfig, GRPOConfig, OptimConfig, PPOConfig, SFTConfig, WorkflowConfig

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "deepspeed"}, "--strategy deepspeed"),
    ({"engine": "vllm"}, "--engine vllm"),
    ({"engine": "sglang"}, "--engine sglang"),
    ({"dtype": "bfloat16"}, "--dtype bfloat16"),
    ({"tp_size": 2}, "--tp_size 2"),
    ({"sp_size": 2}, "--sp_size 2"),
    ({"compile": True}, "--compile True"),
    ({"rollout_ranks": 1}, "--rollout_ranks 1"),
    ({"optim": OptimConfig(name="muon")}, "--optim.name muon"),
    ({"fsdp": FSDPConfig(replicate_size=2)}, "--fsdp.replicate_size 2"),
    ({"rollout": WorkflowConfig(max_staleness=1)}, "--rollout.over_issue, --rollout.max_staleness"),
    ({"rollout": WorkflowConfig(record="there")}, "--rollout.record or --rollout.from"),
    ({"algorithm": AlgorithmConfig(entropy_fraction=0.2)}, "--algorithm.entropy_fraction 0.2"),
    ({"algorithm": AlgorithmConfig(advantage="reinforce_plus_plus")}, "--algorithm.advantage reinforce_plus_plus"),
    ({"reward": ("judge=0.5",)}, "--reward judge=0.5"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_an_option_that_depends_on_the_split_is_refused(options: dict[str, Any], named: str) -> None:
    GRPOConfig(**options)
    with pytest.raises(ValueError, match=f"--exact True does not go with {named}"):
        GRPOConfig(exact=True, **options)


def test_tiles_are_those_of_exact_runs() -> None:
    assert GRPOConfig(exact=True, exact_tile_tokens=64).exact_tile_tokens == 64
    with pytest.raises(ValueError, match="--exact_tile_tokens has no effect without --exact True"):
        GRPOConfig(exact_tile_tokens=64)


def test_plain_options_are_taken_and_other_trainers_have_no_such_option() -> None:
    assert GRPOConfig(exact=True, strategy="fsdp", micro_batch_size=3).exact
    assert PPOConfig(exact=True, strategy="ddp").exact
    assert not SFTConfig().exact
    with pytest.raises(TypeError, match="exact"):
        SFTConfig(exact=True)  # type: ignore[call-arg]
