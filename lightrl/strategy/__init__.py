"""Strategies, found by name or by import path: the built-in ones go through the same import as a user's."""

from __future__ import annotations

import os
from typing import Any

from lightrl.config import RunConfig
from lightrl.imports import load_object
from lightrl.strategy.base import EngineStatus, StrategyBase, TrainedModel, is_actor
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

BUILTIN_STRATEGIES = {
    "single": "lightrl.strategy.single:SingleStrategy",
    "ddp": "lightrl.strategy.ddp:DDPStrategy",
    "fsdp": "lightrl.strategy.fsdp:FSDPStrategy",
    "deepspeed": "lightrl.strategy.deepspeed:DeepSpeedStrategy",
}


def strategy_class(name: str) -> type[StrategyBase]:
    """Returns the class that a name or a package.module:Class path stands for."""
    if name == "auto":
        name = "single" if int(os.environ.get("WORLD_SIZE", "1")) == 1 else "fsdp"
    found = load_object(name, builtin=BUILTIN_STRATEGIES, what="strategy", example="MyStrategy")
    if not isinstance(found, type) or not issubclass(found, StrategyBase):
        raise ValueError(f"Strategy {name!r} is not a subclass of lightrl.StrategyBase.")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ValueError(
            f"Strategy {name!r} does not implement {', '.join(missing)}. Write them, or inherit from a "
            "built-in strategy."
        )
    return found


def create_strategy(config: RunConfig | Any) -> StrategyBase:
    """Makes the strategy that config.strategy names, not yet connected: call setup_distributed() next."""
    return strategy_class(config.strategy)(
        seed=config.seed,
        max_norm=config.optim.max_norm,
        micro_train_batch_size=config.micro_batch_size or 1,
        train_batch_size=config.samples_per_update,
        args=config,
    )
