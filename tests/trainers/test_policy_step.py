"""What GRPO and PPO share."""

from pathlib import Path
from typing import Any

import pytest

from lightrl.config import CheckpointConfig, GRPOConfig
from lightrl.rewards.reward_set import RewardSet
from lightrl.trainers.fit import Shown
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.policy_step import describe_batches, shown_of


def test_the_batch_arithmetic_is_written_out() -> None:
    config = GRPOConfig(num_prompts=6, group_size=4, num_minibatches=2, num_epochs=3, micro_batch_size=2)
    text = describe_batches(config, world_size=4)
    assert "6 prompts x 4 samples = 24 samples a step" in text
    assert "3 epoch(s) x 2 mini-batch(es) = 6 optimizer step(s) of 12 samples" in text
    assert "each of 4 rank(s) about 3 samples in 2 micro-batches of <= 2 samples" in text


def test_the_means_of_several_rewards_are_shown() -> None:
    assert shown_of(RewardSet.from_config(GRPOConfig())) == Shown()
    both = shown_of(RewardSet.from_config(GRPOConfig(reward=("exact_match", "contains=0.1"))))
    names = ("reward/mean", "reward/exact_match", "reward/contains", "episode/failed_share")
    assert both.step == (*names, "tokens/per_second", "entropy")
    assert both.evaluation[2:] == ("eval/reward/exact_match", "eval/reward/contains")


def test_a_micro_batch_must_hold_the_longest_prompt_with_its_response(
    toy_options: dict[str, Any], tmp_path: Path
) -> None:
    """12+34= has 6 tokens, and 6 may follow."""

    def trainer(tokens: int) -> GRPOTrainer:
        options = {**toy_options, "num_prompts": 3, "max_new_tokens": 6, "max_tokens_per_microbatch": tokens}
        folder = str(tmp_path / str(tokens))
        return GRPOTrainer(GRPOConfig(**options, output_dir=folder, checkpoint=CheckpointConfig(every=0)))

    with pytest.raises(ValueError, match="11 cannot hold the longest prompt with --max_new_tokens 6: .* at least 12"):
        trainer(11)
    trainer(12).close()
