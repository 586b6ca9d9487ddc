"""SPMD reinforcement learning for language models, launched by torchrun.

Names are loaded when they are first used (PEP 562), so that importing one light module does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.config import DPOConfig, GRPOConfig, PPOConfig, RMConfig, SFTConfig
    from lightrl.engines.base import InferenceEngine, SamplingParams
    from lightrl.records import Experience, Prompt, Sample
    from lightrl.rollout.client import EngineClient
    from lightrl.rollout.episode import Episode, Turn
    from lightrl.rollout.workflow import Environment, Workflow
    from lightrl.strategy import EngineStatus, StrategyBase, create_strategy, is_actor
    from lightrl.trainers.dpo import DPOTrainer
    from lightrl.trainers.grpo import GRPOTrainer
    from lightrl.trainers.ppo import PPOTrainer
    from lightrl.trainers.reward_model import RMTrainer
    from lightrl.trainers.sft import SFTTrainer

    __version__: str

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "EngineClient",
    "EngineStatus",
    "Environment",
    "Episode",
    "Experience",
    "GRPOConfig",
    "GRPOTrainer",
    "InferenceEngine",
    "PPOConfig",
    "PPOTrainer",
    "Prompt",
    "RMConfig",
    "RMTrainer",
    "SFTConfig",
    "SFTTrainer",
    "Sample",
    "SamplingParams",
    "StrategyBase",
    "Turn",
    "Workflow",
    "__version__",
    "create_strategy",
    "is_actor",
]

_HOMES = {
    "DPOConfig": "lightrl.config",
    "DPOTrainer": "lightrl.trainers.dpo",
    "EngineClient": "lightrl.rollout.client",
    "EngineStatus": "lightrl.strategy",
    "Environment": "lightrl.rollout.workflow",
    "Episode": "lightrl.rollout.episode",
    "Experience": "lightrl.records",
    "GRPOConfig": "lightrl.config",
    "GRPOTrainer": "lightrl.trainers.grpo",
    "InferenceEngine": "lightrl.engines.base",
    "PPOConfig": "lightrl.config",
    "PPOTrainer": "lightrl.trainers.ppo",
    "Prompt": "lightrl.records",
    "RMConfig": "lightrl.config",
    "RMTrainer": "lightrl.trainers.reward_model",
    "SFTConfig": "lightrl.config",
    "SFTTrainer": "lightrl.trainers.sft",
    "Sample": "lightrl.records",
    "SamplingParams": "lightrl.engines.base",
    "StrategyBase": "lightrl.strategy",
    "Turn": "lightrl.rollout.episode",
    "Workflow": "lightrl.rollout.workflow",
    "create_strategy": "lightrl.strategy",
    "is_actor": "lightrl.strategy",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("lightrl")
    if name not in _HOMES:
        raise AttributeError(f"module 'lightrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
