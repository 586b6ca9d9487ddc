"""What GRPO and PPO share."""

from lightrl.config import GRPOConfig
from lightrl.trainers.policy_step import describe_batches


def test_the_batch_arithmetic_is_written_out() -> None:
    config = GRPOConfig(num_prompts=6, group_size=4, num_minibatches=2, num_epochs=3, micro_batch_size=2)
    text = describe_batches(config, world_size=4)
    assert "6 prompts x 4 samples = 24 samples a step" in text
    assert "3 epoch(s) x 2 mini-batch(es) = 6 optimizer step(s) of 12 samples" in text
    assert "each of 4 rank(s) about 3 samples in 2 micro-batches of <= 2 samples" in text
