"""Rewards: functions from a Sample to a number, one to a file. Loaded by name, run by score()."""

from lightrl.rewards.loading import BUILTIN_REWARDS, load_reward
from lightrl.rewards.scoring import AnyReward, BatchReward, Reward, RewardError, batch_reward, score

__all__ = [
    "BUILTIN_REWARDS",
    "AnyReward",
    "BatchReward",
    "Reward",
    "RewardError",
    "batch_reward",
    "load_reward",
    "score",
]
