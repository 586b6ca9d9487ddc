"""What `--exact` puts in front of a strategy, so that its engine has the bits of its policy."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightrl.exact.policy import make_exact
from lightrl.models.policy import Policy
from lightrl.strategy.base import StrategyBase


class ExactServing(StrategyBase):
    """Goes in front of a strategy: its policies score, and its engine generates, by one arithmetic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serving.factories = {"native": "lightrl.exact.engine:build_exact_engine"}

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Makes a policy exact, then places it."""
        if isinstance(model, Policy):
            make_exact(model)
        return super().prepare_model(model)
