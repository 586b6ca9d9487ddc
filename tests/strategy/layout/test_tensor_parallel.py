"""Models cut over ranks: what cannot be cut is told before anything is loaded, the rest equals one process."""

from pathlib import Path

import pytest
import torch
from transformers import (
    ApertusConfig,
    AriaTextConfig,
    AutoModel,
    Gemma3nTextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightrl.config import GRPOConfig
from lightrl.strategy import create_strategy
from lightrl.strategy.fsdp import FSDPStrategy
from lightrl.strategy.layout.tensor_parallel import check_parameters, check_splits, tensor_parallel_plan
from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[2] / "programs" / "split_program.py"
needs_a_plan_without_experts = pytest.mark.skipif(
    "layers.*.mlp.experts" in AriaTextConfig.base_model_tp_plan, reason="transformers' plan (5.24) cuts the experts"
)


def test_two_ranks_equal_one() -> None:
    """Outputs, gradients and whole weights of every model; what stays whole does not drift apart."""
    run_spmd(PROGRAM, "--strategy", "fsdp", "--tp_size", "2", world_size=2, timeout_s=200)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("flags", [("--tp_size", "2"), ("--tp_size", "2", "--fsdp.replicate_size", "2")])
def test_uneven_shards_and_replicas_of_parts(flags: tuple[str, ...]) -> None:
    run_spmd(PROGRAM, "--strategy", "fsdp", *flags, world_size=4, timeout_s=280)


def test_the_plan_leaves_the_embedding_whole() -> None:
    plan = tensor_parallel_plan(Qwen3Config())
    assert plan["layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert plan["layers.*.mlp.down_proj"] == "rowwise"
    assert "embed_tokens" not in plan


def test_what_cannot_be_split_is_told_with_what_can() -> None:
    config = LlamaConfig(num_attention_heads=12, num_key_value_heads=6, intermediate_size=96, hidden_size=96)
    check_splits(config, tp_size=6, sp_size=2)  # 2 heads and 1 key-value head on each rank of tp
    # 12, 6 and 96 have the common divisors 1, 2, 3 and 6
    with pytest.raises(ValueError, match=r"--tp_size 4 does not divide .*6 key-value heads.*Valid: \[1, 2, 3, 6\]"):
        check_splits(config, tp_size=4, sp_size=1)
    # Of 12 heads the divisors are 1, 2, 3, 4, 6, 12; 4 neither divides 6 key-value heads nor is a multiple of them
    with pytest.raises(ValueError, match=r"--sp_size 4 does not fit 12 .* 6 .*Valid: \[1, 2, 3, 6, 12\]"):
        check_splits(config, tp_size=1, sp_size=4)


def test_the_widths_of_all_layers_are_cut() -> None:
    config = Gemma3nTextConfig(
        num_hidden_layers=2, num_key_value_heads=4, intermediate_size=[96, 64], activation_sparsity_pattern=[0.0, 0.0]
    )
    check_splits(config, tp_size=4, sp_size=1)
    config.intermediate_size = [96, 66]  # 6 divides both, 4 does not
    with pytest.raises(ValueError, match=r"--tp_size 4 does not divide .*6 MLP columns. Valid: \[1, 2\]"):
        check_splits(config, tp_size=4, sp_size=1)


def test_columns_that_are_compared_with_all_others_are_refused() -> None:
    config = Gemma3nTextConfig(
        num_hidden_layers=2, num_key_value_heads=4, intermediate_size=96, activation_sparsity_pattern=[0.95, 0.0]
    )
    check_splits(config, tp_size=1, sp_size=2)
    with pytest.raises(ValueError, match="'gemma3n_text': its activation_sparsity_pattern keeps the largest"):
        check_splits(config, tp_size=2, sp_size=1)


def test_projections_that_are_clipped_in_place_are_refused() -> None:
    check_splits(OlmoConfig(), tp_size=2, sp_size=1)
    config = OlmoConfig(clip_qkv=8.0)
    check_splits(config, tp_size=1, sp_size=2)
    with pytest.raises(ValueError, match="cannot cut a model of type 'olmo' with clip_qkv 8: it clips queries"):
        check_splits(config, tp_size=2, sp_size=1)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ApertusConfig(num_hidden_layers=1), "layers.0.mlp.act_fn.alpha_p"),  # sees the columns of a rank
        (PhiConfig(num_hidden_layers=1, qk_layernorm=True), "layers.0.self_attn.q_layernorm.weight"),  # its heads
        pytest.param(  # experts in place of what the plan cuts
            Qwen2MoeConfig(num_hidden_layers=1), "layers.0.mlp.gate.weight", marks=needs_a_plan_without_experts
        ),
    ],
    ids=["activation", "norm", "experts"],
)
def test_parameters_beside_cut_ones_need_a_plan(config: PreTrainedConfig, name: str) -> None:
    with pytest.raises(ValueError, match=f"plan does not say how to cut {name}"):
        check_parameters(decoder_of(config))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(AriaTextConfig(num_hidden_layers=1), marks=needs_a_plan_without_experts),  # outside of what is cut
        Gemma3nTextConfig(num_hidden_layers=1, layer_types=["full_attention"], num_kv_shared_layers=0),
        GPTNeoXConfig(num_hidden_layers=1),
        PhiConfig(num_hidden_layers=1),
        Qwen3Config(num_hidden_layers=1),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_with_a_plan_and_those_of_whole_parts_are_no_problem(config: PreTrainedConfig) -> None:
    check_parameters(decoder_of(config))


def decoder_of(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModel.from_config(config)


def test_models_of_other_kinds_are_refused() -> None:
    check_splits(Qwen2_5_VLConfig(), tp_size=1, sp_size=1)
    check_splits(Qwen2_5_VLConfig(), tp_size=1, sp_size=2)
    with pytest.raises(ValueError, match="'qwen2_5_vl' takes images, and --tp_size 2 cuts models of text alone"):
        check_splits(Qwen2_5_VLConfig(), tp_size=2, sp_size=2)
    with pytest.raises(ValueError, match="'qwen3_moe': it has layers cut as moe_tp_experts, packed_colwise"):
        check_splits(Qwen3MoeConfig(), tp_size=2, sp_size=1)
    with pytest.raises(ValueError, match="'phi3': it has layers cut as colwise_gather_output"):
        check_splits(Phi3Config(), tp_size=2, sp_size=1)
    check_splits(Phi3Config(), tp_size=1, sp_size=2)
    with pytest.raises(ValueError, match="'gpt2': transformers has no plan for it"):
        check_splits(GPT2Config(), tp_size=2, sp_size=1)


def test_a_plan_needs_a_config_with_the_width_of_an_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 has a plan for GPT-J, whose config gives that width as n_inner or not at all."""
    monkeypatch.setattr(GPTJConfig, "base_model_tp_plan", {"h.*.mlp.fc_in": "colwise", "h.*.mlp.fc_out": "rowwise"})
    with pytest.raises(ValueError, match="'gptj': its config has no intermediate_size"):
        check_splits(GPTJConfig(), tp_size=2, sp_size=1)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("option", ["tp_size", "sp_size"])
def test_other_strategies_refuse(strategy: str, option: str) -> None:
    made = create_strategy(GRPOConfig(strategy=strategy, **{option: 2}))
    with pytest.raises(ValueError, match=f"--{option} 2 needs --strategy fsdp"):
        made.setup_distributed()


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="--tp_size is 0: it must be at least 1"):
        GRPOConfig(tp_size=0)


def test_accumulation_by_calls_counts_the_micro_batches_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    # 64 samples in micro-batches of 2: 32, and 8 / (2 x 2) = 2 groups run them, 16 each
    assert FSDPStrategy(0, 1.0, 2, 64, {"tp_size": 2, "sp_size": 2}).accumulation_steps == 16
