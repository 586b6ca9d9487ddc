"""An optimizer step beyond the plain update: with hooks, after calls of backward(), or of an unregistered model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from lightrl.strategy.optim.hooks import UpdateHook
from lightrl.strategy.results import OptimizerStep, TrainedModel
from lightrl.strategy.skipped import Skipping, drop_accumulated


class Updating(Skipping, Protocol):
    """The parts of a strategy that this module needs."""

    def update(self, trained: TrainedModel, divisor: float) -> OptimizerStep:
        """Divides and clips the gradients and, if they are finite, steps the optimizer and the schedule."""
        ...


def hooked_step(
    strategy: Updating,
    trained: TrainedModel,
    hooks: Sequence[UpdateHook],
    *,
    is_boundary: bool | None = None,
    **unknown: Any,
) -> OptimizerStep:
    """Updates the model at the end of an accumulation and calls the hooks; all ranks decide alike.

    is_boundary: True updates now, False never; None lets the hooks count the calls of backward().
    """
    if unknown:
        raise TypeError(f"optimizer_step() takes no {', '.join(sorted(unknown))}; known: is_boundary.")
    model, optimizer = trained.model, trained.optimizer
    strategy.trained.see(model, optimizer, trained.scheduler)
    rates = strategy.trained.rates(optimizer)
    if not (all(hook.is_boundary() for hook in hooks) if is_boundary is None else is_boundary):
        return OptimizerStep(grad_norm=0.0, lr_list=rates, stepped=False)
    strategy.trained.require_on_device(model, optimizer)
    if not all(hook.may_update(strategy.comm) for hook in hooks):
        return drop_accumulated(strategy, optimizer, model)
    divisor = math.prod([hook.loss_factor(optimizer) * hook.gradient_divisor() for hook in hooks])
    step = strategy.update(trained, divisor)
    for hook in hooks:
        hook.after_update(optimizer, is_finite=not step.skipped)
    return step._replace(lr_list=rates)
