"""A step, phase by phase."""

from typing import Any

import pytest
from tiny_vlm import FAMILIES, tiny_config

from lightrl.config import GRPOConfig, PPOConfig, SFTConfig
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
