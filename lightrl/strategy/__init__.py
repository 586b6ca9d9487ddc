"""Strategies: how a model is spread over ranks, trained, saved and served."""

from __future__ import annotations

from lightrl.strategy.base import (
    BUILTIN_STRATEGIES,
    EngineStatus,
    StrategyBase,
    TrainedModel,
    create_strategy,
    is_actor,
    strategy_class,
)
from lightrl.strategy.torch_native import TorchStrategy

__all__ = [
    "BUILTIN_STRATEGIES",
    "EngineStatus",
    "StrategyBase",
    "TorchStrategy",
    "TrainedModel",
    "create_strategy",
    "is_actor",
    "strategy_class",
]
