"""The mixin that `--exact` adds to a strategy, so that engine and policy compute the same bits."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightrl.exact.policy import make_exact
from lightrl.models.policy import Policy
from lightrl.strategy.base import StrategyBase


class ExactServing(StrategyBase):
    """Mixin for a strategy that makes its policies and its engine use the same arithmetic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serving.factories = {"native": "lightrl.exact.engine:build_exact_engine"}

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Makes a policy exact, then prepares it."""
        if isinstance(model, Policy):
            make_exact(model)
        return super().prepare_model(model)
