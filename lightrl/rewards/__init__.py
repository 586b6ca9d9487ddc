"""Rewards: functions from a Sample to a number, which RewardSet loads by name and runs."""

from lightrl.rewards.reward_set import BUILTIN_REWARDS, load_reward, score
from lightrl.rewards.scoring import (
    NO_REWARD,
    AnyReward,
    BatchReward,
    GroupReward,
    NoVerdictError,
    OwnRewards,
    Reward,
    RewardError,
    batch_reward,
    group_reward,
    has_reward,
    isolated_reward,
)

__all__ = [
    "BUILTIN_REWARDS",
    "NO_REWARD",
    "AnyReward",
    "BatchReward",
    "GroupReward",
    "NoVerdictError",
    "OwnRewards",
    "Reward",
    "RewardError",
    "batch_reward",
    "group_reward",
    "has_reward",
    "isolated_reward",
    "load_reward",
    "score",
]
