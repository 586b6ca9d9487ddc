"""A step, phase by phase."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from tiny_vlm import FAMILIES, tiny_config

from lightrl.config import GRPOConfig, PPOConfig, SFTConfig
from lightrl.plan.models import policy_of
from lightrl.plan.peaks import Machine, Models, Plan, plan_run

MACHINE = Machine(ranks=1, memory=0, prompt_tokens=8, response_tokens=0, is_accelerator=False)
SIZES: dict[str, Any] = {"num_prompts": 2, "group_size": 2, "max_new_tokens": 24, "max_tokens_per_microbatch": 64}


def planned(config: Any, small_config: Any) -> Plan:
    machine = (
        MACHINE if not isinstance(config, SFTConfig) else Machine(ranks=1, memory=0, prompt_tokens=8, response_tokens=8)
    )
    return plan_run(config, Models(small_config, config), machine)


def test_the_phases_of_grpo(small_config: Any) -> None:
    config = GRPOConfig(**SIZES)
    config.algorithm.kl_coef = 0.1
    made = planned(config, small_config)
    assert [phase.name for phase in made.phases] == ["generate", "score by reference", "train policy", "weight sync"]
    train = made.phases[2]
    assert train is made.peak
    assert train.parts["optimizer"] == 2 * train.parts["gradients"] == 2 * train.parts["engine asleep"]
    assert train.total == pytest.approx(sum(train.parts.values()))


def test_the_phases_of_ppo_and_sft(small_config: Any) -> None:
    names = [phase.name for phase in planned(PPOConfig(**SIZES), small_config).phases]
    assert names == ["generate", "score by critic", "train critic", "train policy", "weight sync"]
    assert [phase.name for phase in planned(SFTConfig(), small_config).phases] == ["train policy"]


def test_the_optimizer_that_waits_may_leave_the_device(small_config: Any) -> None:
    phases = {}
    for leaves in (False, True):
        config = PPOConfig(**SIZES)
        config.critic.offload_waiting_optimizer = leaves
        phases[leaves] = {phase.name: phase for phase in planned(config, small_config).phases}
    for trained, waiting in (("policy", "critic optimizer"), ("critic", "optimizer")):
        one, other = (phases[leaves][f"train {trained}"] for leaves in (False, True))
        assert one.parts[waiting] > 0 == other.parts.get(waiting, 0)
        assert one.total - other.total == one.parts[waiting]


def test_a_critic_counts_by_its_own_size(small_config: Any) -> None:
    config, deeper = PPOConfig(**SIZES), copy.deepcopy(small_config)
    deeper.num_hidden_layers, deeper.layer_types = 9, ["full_attention"] * 9
    alike = plan_run(config, Models(small_config, config), MACHINE)
    larger = plan_run(config, Models(small_config, config, {"critic": deeper}), MACHINE)
    block = sum(item.numel for item in policy_of(small_config, config).weights if ".layers.0." in item.name)
    # Scored once and trained once, where the backward is worth two passes; a block also multiplies attention's scores.
    length, more = alike.batches.length, deeper.num_hidden_layers - small_config.num_hidden_layers
    of_token = more * (2 * block + 2 * small_config.num_attention_heads * small_config.head_dim * length)
    tokens = alike.batches.sequences * alike.batches.computed_share * length
    assert larger.flops - alike.flops == pytest.approx(4 * tokens * of_token)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_takes_images_needs_what_its_text_does(family: str) -> None:
    """The tower's weights count, its passes do not."""
    hf_config = tiny_config(family)
    small, large = (planned(PPOConfig(**SIZES | {"max_new_tokens": length}), hf_config) for length in (24, 56))
    tower = sum(weight.numel for weight in Models(hf_config, GRPOConfig()).policy.weights if "visual" in weight.name)
    assert tower > 0
    assert all(phase.parts["weights"] > 4 * tower for phase in small.phases)
    one, other = ({phase.name: phase.parts for phase in made.phases} for made in (small, large))
    for name in ("score by critic", "train critic", "train policy"):
        # Two sequences of 32 tokens in a micro-batch, and one of 64.
        assert one[name]["activations"] == pytest.approx(other[name]["activations"], rel=0.25)


def test_what_leaves_the_device_while_the_engine_generates(small_config: Any) -> None:
    beside = planned(GRPOConfig(**SIZES), small_config)
    alone = planned(GRPOConfig(**SIZES, offload_while_generating=True), small_config)
    assert alone.phases[0].total < beside.phases[0].total
    assert alone.host > beside.host == 0


def test_ranks_that_only_generate_leave_some_to_train(small_config: Any) -> None:
    with pytest.raises(ValueError, match="--rollout_ranks 1 leaves none of 1 ranks"):
        planned(GRPOConfig(**SIZES, rollout_ranks=1), small_config)
    apart, machine = GRPOConfig(**SIZES, rollout_ranks=1, strategy="fsdp"), replace(MACHINE, ranks=3)
    made = plan_run(apart, Models(small_config, apart), machine)
    assert made.engine is not None
    assert (made.engine.cached_tokens, made.batches.of_rank) == (4 * 32, 2)  # one engine's, and one of two trainers'


def test_a_reward_model_stays_beside_the_trainer_or_whole_where_samples_are_scored(small_config: Any) -> None:
    without = planned(GRPOConfig(**SIZES), small_config)
    config = GRPOConfig(**SIZES, reward=("reward_model",), reward_model="x")
    made = plan_run(config, Models(small_config, config, {"reward_model": small_config}), MACHINE)
    names = [phase.name for phase in made.phases]
    assert names == ["generate", "score by reward model", "train policy", "weight sync"]
    # The head of one row takes the place of the output layer: (64 - 1) x 32 weights less than the policy has.
    num_weights = without.num_weights - 63 * 32
    for phase in made.phases:
        assert phase.parts["reward model weights"] == pytest.approx(4 * num_weights, rel=1e-2)  # and buffers
    assert made.phases[1].parts["activations"] > 0
    assert made.peak.total == pytest.approx(without.peak.total + made.phases[2].parts["reward model weights"])
    forward, added = 2 * (num_weights - 64 * 32) * made.batches.length, made.flops - without.flops
    assert forward < added / made.batches.sequences < 2 * forward  # with attention
    apart = GRPOConfig(**SIZES, reward=("reward_model",), reward_model="x", rollout_ranks=1, strategy="fsdp")
    machine = Machine(ranks=3, memory=0, prompt_tokens=8, response_tokens=0, is_accelerator=False)
    made = plan_run(apart, Models(small_config, apart, {"reward_model": small_config}), machine)
    assert made.flops == without.flops + added
    holding = [phase.name for phase in made.phases if "reward model weights" in phase.parts]
    assert holding == ["generate"]
    assert made.phases[0].parts["reward model weights"] == pytest.approx(4 * num_weights, rel=1e-2)
