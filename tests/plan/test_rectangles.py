"""What ranks of Megatron keep, by hand; tests/strategy/megatron runs the layouts themselves."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from lightrl.config import GRPOConfig, MegatronConfig
from lightrl.plan.models import critic_of, policy_of
from lightrl.plan.rectangles import stage_bytes
from lightrl.plan.spread import kept_of

VOCABULARY = 64 * 32
MATRICES = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48  # of a layer: queries, output, keys, values; the MLP
NORMS = 2 * 8 + 2 * 32


def bytes_of(small_config: Any, ranks: int, tp_size: int = 1, **options: Any) -> tuple[float, float, float]:
    config = GRPOConfig(strategy="megatron", tp_size=tp_size, megatron=MegatronConfig(**options))
    found = stage_bytes(policy_of(small_config, config), config, ranks)
    return found.weights, found.trained, found.states


def test_ranks_of_tensors_have_half_of_every_matrix_and_all_of_what_is_small(small_config: Any) -> None:
    numel = VOCABULARY + 32 + 3 * (MATRICES / 2 + NORMS)  # an embedding and an output of 64 rows each
    assert bytes_of(small_config, 2, tp_size=2) == (4 * numel, 4 * numel, 8 * numel)


def test_the_last_of_three_stages_has_a_layer_the_last_norm_and_the_output(small_config: Any) -> None:
    numel = VOCABULARY + 32 + MATRICES + NORMS
    assert bytes_of(small_config, 3, pp_size=3) == (4 * numel, 4 * numel, 8 * numel)


def test_replicas_share_the_states_of_the_distributed_optimizer(small_config: Any) -> None:
    numel = 2 * VOCABULARY + 32 + 3 * (MATRICES + NORMS)
    weights, trained, states = bytes_of(small_config, 2, distributed_optimizer=True)
    assert (weights, trained) == (4 * numel, 4 * numel)
    assert 4 * numel <= states <= 4.4 * numel  # whole tensors are given out, so not quite a half


def test_experts_have_replicas_of_their_own() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixture = Qwen3MoeConfig(**sizes, head_dim=8, vocab_size=64, num_experts=4, moe_intermediate_size=512)
    _, _, states = bytes_of(mixture, 4, ep_size=2, distributed_optimizer=True)
    # Two experts of a layer: 32,768 numbers of the output, 65,536 of the others. By name, two replicas step
    # 32 + 32 + 65 and 65 + 32 + 65 thousand; all else is smaller than 14,000.
    assert 8 * 163_840 < states < 8 * (163_840 + 14_000)


def test_bfloat16_has_two_bytes_of_a_weight_and_main_copies_where_it_trains(small_config: Any) -> None:
    config = GRPOConfig(strategy="megatron", dtype="bfloat16", megatron=MegatronConfig(pp_size=3), ema_decay=0.9)
    numel = VOCABULARY + 32 + MATRICES + NORMS
    model = policy_of(small_config, config)
    found = kept_of(model, config, 3, several=True)
    assert (found.weights, found.master) == (2 * numel + model.buffer_bytes, 4 * numel)
    assert (found.gradients, found.waiting, found.average, found.optimizer) == (*[4 * numel] * 3, 8 * numel)
    frozen = policy_of(small_config, config, role="reference")
    found = kept_of(frozen, config, 3, several=True)
    assert (found.weights, found.master) == (2 * numel + model.buffer_bytes, 0)

    whole = GRPOConfig(strategy="megatron", dtype="bfloat16")
    held = stage_bytes(critic_of(small_config, whole), whole, 1)
    numel = VOCABULARY + 32 + 3 * (MATRICES + NORMS)
    assert (held.weights, held.main) == (2 * numel + 4 * 33, 4 * numel)  # the head of 33 computes in float32


def test_the_plan_counts_them(small_config: Any) -> None:
    config = GRPOConfig(strategy="megatron", megatron=MegatronConfig(pp_size=3), ema_decay=0.9)
    model = policy_of(small_config, config)
    found = kept_of(model, config, 3, several=True)
    numel = VOCABULARY + 32 + MATRICES + NORMS
    assert found.weights == 4 * numel + model.buffer_bytes
    assert found.average == found.waiting == found.gradients == 4 * numel
    assert found.optimizer == 8 * numel


def test_what_the_strategy_refuses_is_refused(small_config: Any) -> None:
    with pytest.raises(ValueError, match="--megatron.pp_size x --megatron.vpp_size 2 does not divide the model's 3"):
        bytes_of(small_config, 2, pp_size=2)
