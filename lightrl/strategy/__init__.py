"""Strategies: how a model is spread over ranks, trained, saved and served."""

from __future__ import annotations

from typing import Any

from lightrl.imports import load_object
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


def __getattr__(name: str) -> Any:
    """Returns a built-in strategy by its class name; the packages that it needs are imported only now."""
    for path in BUILTIN_STRATEGIES.values():
        if path.endswith(f":{name}"):
            return load_object(path, builtin={}, what="strategy", example=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
