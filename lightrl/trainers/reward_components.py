"""Groups for estimators that need more than the sum of their rewards, such as each reward by itself (GDPO)."""

from __future__ import annotations

from typing import Any

from lightrl.algorithms.registry import AdvantageTraits, find, traits_of
from lightrl.config import GRPOConfig
from lightrl.records import ScoredGroup
from lightrl.rewards.components import ComponentKeeper
from lightrl.rewards.reward_set import RewardSet
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
    if keeper is None:
        return groups
    with trainer.strategy.comm.phase("the values of each reward", local=True):
        return keeper.completed(groups)


def keeper_of(config: Any, rewards: RewardSet) -> ComponentKeeper | None:
    """Returns a listener to the rewards if the estimator needs each by itself."""
    if not isinstance(config, GRPOConfig):
        return None
    needs = traits_of(find("advantage", config.algorithm.advantage), AdvantageTraits).needs
    return ComponentKeeper(rewards) if "components" in needs else None
