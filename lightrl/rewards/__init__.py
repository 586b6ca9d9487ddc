"""Rewards: functions from a Sample to a number, one to a file. Loaded by name, run by RewardSet."""

from lightrl.rewards.failures import NO_REWARD, RewardError, has_reward
from lightrl.rewards.kinds import (
    AnyReward,
    BatchReward,
    GroupReward,
    NoVerdictError,
    Reward,
    batch_reward,
    group_reward,
    isolated_reward,
)
from lightrl.rewards.loading import BUILTIN_REWARDS, load_reward
from lightrl.rewards.scoring import score

__all__ = [
    "BUILTIN_REWARDS",
    "NO_REWARD",
    "AnyReward",
    "BatchReward",
    "GroupReward",
    "NoVerdictError",
    "Reward",
    "RewardError",
    "batch_reward",
    "group_reward",
    "has_reward",
    "isolated_reward",
    "load_reward",
    "score",
]
