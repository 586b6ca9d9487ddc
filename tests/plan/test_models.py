"""Models without weights."""

from typing import Any

from lightrl.config import GRPOConfig, LoraConfig, PPOConfig, RMConfig
from lightrl.plan.models import critic_of, policy_of, reward_model_of

# q 32x32, k and v 16x32, o 32x32, norms of q and k 8 each, gate up down 3x32x48, two norms 32.
BLOCK = 2 * 32 * 32 + 2 * 16 * 32 + 2 * 8 + 3 * 32 * 48 + 2 * 32


def test_weights_are_those_of_the_real_modules(small_config: Any) -> None:
    model = policy_of(small_config, GRPOConfig())
    by_unit = {unit: sum(item.numel for item in model.weights if item.unit == unit) for unit in range(4)}
    assert by_unit == {0: 2 * 64 * 32 + 32, 1: BLOCK, 2: BLOCK, 3: BLOCK}
    assert len(model.trained) == len(model.weights)
    assert {item.name.split(".")[-2] for item in model.weights if item.is_cut} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert not policy_of(small_config, GRPOConfig(), "reference").trained


def test_adapters_and_heads_train(small_config: Any) -> None:
    adapted = policy_of(small_config, GRPOConfig(lora=LoraConfig(rank=2, target_modules=("q_proj",))))
    assert sum(item.numel for item in adapted.trained) == 3 * 2 * (32 + 32)  # A and B of three blocks
    critic = critic_of(small_config, PPOConfig())
    assert sum(item.numel for item in critic.weights) == 3 * BLOCK + 64 * 32 + 32 + 33  # no output layer, one value
    classifier = reward_model_of(small_config, RMConfig())
    assert sum(item.numel for item in classifier.weights) == 3 * BLOCK + 64 * 32 + 32 + 32
