"""Groups for estimators that need more than the sum of their rewards, such as each reward by itself (GDPO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightrl.algorithms.registry import AdvantageTraits, find, traits_of
from lightrl.config import GRPOConfig
from lightrl.metrics import Statistics
from lightrl.records import ScoredGroup
from lightrl.rewards.components import ComponentKeeper
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import has_reward
from lightrl.rollout.collector import Prompts
from lightrl.trainers.greedy_baseline import with_baselines


def make_needed(trainer: Any, prompts: Prompts) -> list[ScoredGroup]:
    """Makes a trainer's groups with what its estimator needs."""
    keeper: ComponentKeeper | None = trainer.components
    is_complete = getattr(trainer.collector, "completes_groups", False)  # where their samples were scored
    if keeper is None and "components" in trainer.objective.traits.needs and not is_complete:
        keeper = trainer.components = ComponentKeeper(trainer.rewards)
    if keeper is not None:
        keeper.forget()  # an evaluation, whose samples are gone
    groups: list[ScoredGroup]
    if "greedy_baseline" in trainer.objective.traits.needs:
        groups = with_baselines(trainer, prompts)
    else:
        groups = trainer.score(trainer.sample(prompts))
    if keeper is not None:
        with trainer.strategy.comm.phase("the values of each reward", local=True):
            groups = keeper.completed(groups)
    count_equal_components(groups, trainer.statistics)
    return groups


def count_equal_components(groups: Sequence[ScoredGroup], statistics: Statistics) -> None:
    """Corrects reward/equal_groups, for which describe_rollout() compares sums, where each reward counts by itself.

    Two rewards that differ within a group teach something even if their sums are equal.
    """
    for group in groups:
        known = [reward for reward in group.rewards if has_reward(reward)]
        if known and any(sample.components for sample in group.samples):
            # describe_rollout() has counted this group by its sums: replace that, and leave the number of groups.
            statistics.mean("reward/equal_groups", (not group.has_signal) - (min(known) == max(known)), 0)


def keeper_of(config: Any, rewards: RewardSet) -> ComponentKeeper | None:
    """Returns a listener to the rewards if the estimator needs each by itself."""
    if not isinstance(config, GRPOConfig):
        return None
    needs = traits_of(find("advantage", config.algorithm.advantage), AdvantageTraits).needs
    return ComponentKeeper(rewards) if "components" in needs else None
