"""What stages of a pipeline keep, by hand; benchmarks/plan.py measures it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from lightrl.config import GRPOConfig, parse_config
from lightrl.plan.activations import PackShape
from lightrl.plan.models import policy_of
from lightrl.plan.peaks import Machine, Models, plan_run
from lightrl.plan.stages import StageNeed, rank_shape, stage_need

PACK = PackShape(num_sequences=4, length=30, num_scored=24)


def config_of(flags: str) -> GRPOConfig:
    return parse_config(GRPOConfig, f"--strategy megatron {flags}".split())


def need(hf_config: Any, flags: str, stage: int = 0, micro_batches: int = 8, trains: bool = True) -> StageNeed:
    config = config_of(flags)
    settings: dict[str, Any] = {"micro_batches": micro_batches, "trains": trains, "on_accelerator": False}
    return stage_need(policy_of(hf_config, config), PACK, config, stage, **settings)


def test_the_first_stage_keeps_a_micro_batch_for_each_stage_and_the_last_keeps_one(small_config: Any) -> None:
    stages = [need(small_config, "--megatron.pp_size 3", stage) for stage in range(3)]
    assert [stage.waiting for stage in stages] == [3, 2, 1]
    assert stages[2].work > stages[1].work  # the logits
    first = stages[0]
    assert first.first_backward - first.next_backward == first.kept
    assert need(small_config, "--megatron.pp_size 3", micro_batches=1).waiting == 1
    whole = need(small_config, "")
    assert whole.waiting == 1
    assert whole.kept == pytest.approx(3 * first.kept, rel=0.1)  # a layer of three: but for the embedding's output


def test_chunks_that_take_turns_keep_more(small_config: Any) -> None:
    six = type(small_config)(**{**small_config.to_dict(), "num_hidden_layers": 6, "layer_types": None})
    plain, chunked = (need(six, f"--megatron.pp_size 3 {more}") for more in ("", "--megatron.vpp_size 2"))
    # 2 x 2 + 3 + 1 = 8 chunks of one layer, where 3 stages of 2 layers are 6.
    assert chunked.kept * chunked.waiting > plain.kept * plain.waiting
    assert chunked.waiting == 4
    plain, chunked = (need(six, f"--megatron.pp_size 3 {more}", 1) for more in ("", "--megatron.vpp_size 2"))
    # 2 + 3 + 1 = 6 chunks of one layer are 3 micro-batches with two layers each.
    assert (plain.waiting, chunked.waiting) == (2, 3)
    assert chunked.kept == pytest.approx(plain.kept, rel=1e-9)


def test_what_splits_tokens_and_matrices_splits_what_is_kept(small_config: Any) -> None:
    whole = need(small_config, "").kept
    tensors = need(small_config, "--tp_size 2").kept
    sequences = need(small_config, "--tp_size 2 --megatron.sequence_parallel True").kept
    context = need(small_config, "--megatron.cp_size 2").kept
    assert 0.4 * whole < sequences < tensors < whole
    assert 0.5 * whole < context < whole  # keys and values of all tokens are kept
    assert need(small_config, "--megatron.recompute full").kept < 0.3 * whole
    assert need(small_config, "--dtype bfloat16").kept < 0.7 * whole
    assert need(small_config, "", trains=False).first_backward < whole


def test_the_layout_of_a_rank(small_config: Any) -> None:
    config = config_of("--tp_size 2 --megatron.sequence_parallel True --megatron.cp_size 2")
    shape = rank_shape(policy_of(small_config, config), PACK, config)
    assert shape.lengths == (32, 32, 32, 32)  # multiples of 4
    assert (shape.num_tokens, shape.num_heads, shape.num_groups, shape.width) == (64, 2, 1, 24)
    assert (shape.num_scored, shape.split_by) == (48, 2)


def test_experts_count_the_tokens_that_they_are_sent() -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "num_experts": 4, "moe_intermediate_size": 16}
    one, two = (Qwen3MoeConfig(**sizes, num_experts_per_tok=count) for count in (1, 2))
    assert need(two, "").kept > need(one, "").kept
    assert need(two, "--megatron.ep_size 2").kept == pytest.approx(need(two, "").kept, rel=0.05)
    config = config_of("--tp_size 2 --megatron.sequence_parallel True --megatron.ep_size 2 --megatron.etp_size 1")
    shape = rank_shape(policy_of(two, config), PACK, config)
    assert (shape.num_experts, shape.width) == (2, 16)  # tensor parallelism leaves an expert whole


@pytest.mark.parametrize(("vocab_size", "is_last"), [(64, False), (8192, True)])
def test_the_plan_is_of_the_stage_that_needs_most(small_config: Any, vocab_size: int, is_last: bool) -> None:
    hf_config = type(small_config)(**{**small_config.to_dict(), "vocab_size": vocab_size})
    config = config_of("--megatron.pp_size 3 --num_prompts 6 --group_size 4 --max_new_tokens 24")
    machine = Machine(ranks=3, memory=0, prompt_tokens=8, response_tokens=0, is_accelerator=False)
    plan = plan_run(config, Models(hf_config, config), machine)
    train = next(phase for phase in plan.phases if phase.name == "train policy")
    assert ("logits chunk" in train.parts) is is_last
    assert plan.batches.micro_batches == 3
