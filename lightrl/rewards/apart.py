"""Rewards of models in a run with ranks that only generate (--rollout_ranks): each of these ranks scores by itself.

The ranks that train do not load the models. A rank that generates holds each one whole, since its groups are finished
at moments of their own, and ranks that shared a model would have to wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightrl.alone import Alone
from lightrl.comm import Comm
from lightrl.rewards.reward_set import RewardSet, is_collective


def needs_all_ranks(rewards: RewardSet) -> str | None:
    """Returns the label of a reward that no rank can compute by itself, if there is one."""
    labels = (item.label for item in rewards.rewards if is_collective(item.reward) and not works_apart(item.reward))
    return next(labels, None)


def works_apart(reward: Any) -> bool:
    """Returns whether a rank can compute a reward of all ranks by itself."""
    return bool(getattr(reward, "works_apart", False))


def leave_to_others(rewards: RewardSet) -> None:
    """Takes the models out of the rewards of a rank that does not score."""
    for index, item in enumerate(rewards.rewards):
        if is_collective(item.reward):
            rewards.rewards[index] = replace(item, reward=_Elsewhere())


def share_models(lender: RewardSet, borrower: RewardSet) -> None:
    """Lets rewards that were made from the same config use the models of others, which are loaded."""
    for index, item in enumerate(lender.rewards):
        if is_collective(item.reward):
            borrower.rewards[index] = item


class _Elsewhere:
    """A reward that ranks of another role compute."""

    is_collective = True
    works_apart = True

    def prepare(self, strategy: Any) -> None:
        """Loads nothing."""


class LoneHost:
    """The part of a strategy that a reward model uses (model_reward.ModelHost), on a rank that scores by itself."""

    materializes_weights = True

    def __init__(self, strategy: Any) -> None:
        self.comm: Comm = strategy.comm  # while models are loaded, so that an error of one rank ends all
        self.device, self.tokenizer = strategy.device, strategy.tokenizer
        self.prepare = strategy.prepare

    @torch.no_grad()
    def forward(self, data: Sequence[Any], /, *, model: nn.Module) -> list[Any]:
        """Returns model(batch) for each batch, in order."""
        return [model(batch) for batch in data]


def load_apart(rewards: RewardSet, strategy: Any) -> None:
    """Loads the models of the rewards on a rank that scores by itself; every rank that generates calls it."""
    host = LoneHost(strategy)
    rewards.prepare(host)
    host.comm = Alone()  # from now on no rank waits for another
