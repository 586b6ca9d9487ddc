"""Checks the functions and classes that options name, for a dry run: a run would refuse them after its start."""

from __future__ import annotations

from lightrl.config import GRPOConfig, PPOConfig, RolloutConfig, RunConfig
from lightrl.engines.base import check_engine_name
from lightrl.imports import load_object
from lightrl.rewards.reward_set import BUILTIN_REWARDS, own_reward
from lightrl.rollout.workflow import BUILTIN_WORKFLOWS
from lightrl.trainers.objective import PolicyLoss, PolicyObjective
from lightrl.trainers.token_advantages import TokenAdvantages


def check_named(config: RunConfig) -> None:
    """Raises ValueError or ImportError for a name or a parameter that the run would refuse.

    Classes are looked up but not constructed: constructing a reward or a workflow may start something.
    """
    if isinstance(config, GRPOConfig | PPOConfig):
        _check_algorithm(config)
    if isinstance(config, RolloutConfig):
        check_engine_name(config.engine)
        for name in (text.rpartition("=")[0] or text for text in config.reward):  # without its weight
            if name not in BUILTIN_REWARDS:
                own_reward(name)
        if (workflow := config.rollout.workflow) and workflow not in BUILTIN_WORKFLOWS:
            load_object(workflow, builtin=BUILTIN_WORKFLOWS, what="workflow", example="MyWorkflow")


def _check_algorithm(config: GRPOConfig | PPOConfig) -> None:
    """Builds the objective as the trainer would, which checks names and parameters."""
    if isinstance(config, GRPOConfig):
        teacher = config.distillation if config.teacher_model else None
        size, routing = config.group_size, config.routing
        PolicyObjective(config.algorithm, group_size=size, distillation=teacher, has_selector=True, routing=routing)
    else:
        in_loss = config.algorithm.kl_in_reward == "none"
        PolicyLoss(config.algorithm, kl_in_loss=in_loss, routing=config.routing)
        TokenAdvantages(config.algorithm)
