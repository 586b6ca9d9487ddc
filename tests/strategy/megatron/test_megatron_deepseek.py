"""DeepSeek-V3's layers equal those of transformers; test_megatron_strategy.py trains it on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config

from lightrl.config import RoutingConfig, StrategyOptions
from lightrl.strategy.megatron import deepseek
from lightrl.strategy.megatron.checks import check_config
from lightrl.strategy.megatron.parts import COLUMNS, ROWS, WHOLE, Place, Sizes, slot_of

SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    ("changes", "sizes", "text"),
    [
        ({}, Sizes(tp=2), "by --tp_size 2: its latent attention stays whole"),
        ({}, Sizes(cp=2), "by --megatron.cp_size 2"),
        ({}, Sizes(etp=2), "by --megatron.etp_size 2"),
        ({}, Sizes(ep=3), "--megatron.ep_size 3 does not divide the model's 8 experts"),
        ({"norm_topk_prob": False}, Sizes(), "norm_topk_prob False"),
        ({"num_experts_per_tok": 1}, Sizes(), "routers that choose one expert"),
        ({"num_experts_per_tok": 2}, Sizes(), "2 experts of 2 groups"),
        ({"n_shared_experts": 0}, Sizes(), "layers without a shared expert"),
        ({"first_k_dense_replace": 4}, Sizes(), "layers that are all dense"),
        ({"attention_bias": True}, Sizes(), "the bias of the attention's output"),
    ],
)
def test_models_that_it_does_not_spread(changes: dict[str, Any], sizes: Sizes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_config(DeepseekV3Config(**SMALL | changes), sizes, sequence_parallel=sizes.tp > 1)


def test_models_that_it_spreads() -> None:
    check_config(DeepseekV3Config(**SMALL), Sizes(pp=2, ep=2), sequence_parallel=False)
    one_group = SMALL | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    check_config(DeepseekV3Config(**one_group), Sizes(pp=2), sequence_parallel=False)
    assert "moe_router_num_groups" not in deepseek.core_settings(DeepseekV3Config(**one_group))
    assert deepseek.core_settings(DeepseekV3Config(**SMALL))["moe_router_num_groups"] == 4


def test_options_that_it_does_not_follow() -> None:
    config = DeepseekV3Config(**SMALL)
    deepseek.check_options(config, StrategyOptions())
    with pytest.raises(ValueError, match="--dtype bfloat16 with a deepseek_v3 model"):
        deepseek.check_options(config, StrategyOptions(dtype="bfloat16"))
    with pytest.raises(ValueError, match="--routing.replay True with a deepseek_v3 model"):
        deepseek.check_options(config, StrategyOptions(routing=RoutingConfig(replay=True)))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("self_attn.q_a_proj.weight", WHOLE),
        ("self_attn.q_b_proj.weight", ROWS),
        ("self_attn.kv_a_proj_with_mqa.weight", WHOLE),
        ("self_attn.kv_b_proj.weight", ROWS),
        ("mlp.shared_experts.up_proj.weight", ROWS),
        ("mlp.shared_experts.down_proj.weight", COLUMNS),
    ],
)
def test_the_table_knows_its_parameters(name: str, cut: str) -> None:
    slot = slot_of(f"layers.3.{name}", Sizes(pp=2), Place(pp=1), num_layers=4, is_tied=False)
    assert slot is not None
    assert (slot.path.startswith("decoder.layers.1."), slot.cut) == (True, cut)


def test_yarn_sharpens_the_scores() -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}
    assert deepseek._scale({"rope_type": "default"}, 16) == 0.25
    assert deepseek._scale(yarn | {"mscale_all_dim": 0}, 16) == 0.25
    # 0.1 x ln 40 + 1 = 1.36889; its square is 1.87386, and a quarter of that 0.468464.
    assert deepseek._scale(yarn, 16) == pytest.approx(0.468464, abs=1e-5)
