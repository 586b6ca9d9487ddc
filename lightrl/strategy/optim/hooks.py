"""UpdateHook: how an optional feature takes part in the updates of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightrl.comm import Comm
from lightrl.strategy.layout.plain import SavedTensors

HOOKS = "update_hooks"  # the attribute of an optimizer that lists its hooks; absent if it has none


class UpdateHook:
    """An optional feature, such as a weight average; a subclass overrides the moments that it needs."""

    def loss_factor(self, optimizer: Optimizer) -> float:
        """Returns a factor by which losses are multiplied and gradients divided, the same until after_update()."""
        return 1.0

    def gradient_divisor(self) -> float:
        """Returns a number by which gradients are divided before the clip."""
        return 1.0

    def is_boundary(self) -> bool:
        """Returns whether optimizer_step() has enough gradients for an update."""
        return True

    def may_update(self, comm: Comm) -> bool:
        """Returns whether an update may be made, the same on all ranks."""
        return True

    def reported_rates(self, optimizer: Optimizer, rates: list[float]) -> list[float]:
        """Returns the learning rates to report for the update to come."""
        return rates

    def before_clip(self, optimizer: Optimizer) -> None:
        """Acts on the reduced gradients, before their norm is computed."""

    def after_update(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        """Follows each update, whether taken or skipped because the norm or the loss was not finite."""

    # ---- Offload and checkpoints -------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """Returns tensors that leave the device together with the optimizer's states."""
        return []

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns entries for the state of a checkpoint."""
        return {}

    def restore(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint, which may lack the entries."""

    def write_tensors(self, write: Callable[[str, Sequence[tuple[str, Tensor]]], None]) -> None:
        """Adds tensors to a checkpoint by write(kind, [(name, tensor), ...]); every rank calls it."""

    def read_tensors(self, read: Callable[[str], SavedTensors], state: dict[str, Any]) -> None:
        """Follows the reading of the model's weights; read(kind) opens tensors, state is the checkpoint's.

        An empty state means that only the weights are wanted.
        """


def hooks_of(optimizer: Optimizer | None) -> list[UpdateHook]:
    """Returns the hooks attached to an optimizer."""
    hooks: list[UpdateHook] = getattr(optimizer, HOOKS, [])
    return hooks


def attach(optimizer: Optimizer, hook: UpdateHook) -> None:
    """Adds a hook to every update of the optimizer from now on."""
    setattr(optimizer, HOOKS, [*hooks_of(optimizer), hook])


def detach(optimizer: Optimizer, hook: UpdateHook) -> None:
    """Ends the part of a hook in the optimizer's updates."""
    setattr(optimizer, HOOKS, [other for other in hooks_of(optimizer) if other is not hook])
