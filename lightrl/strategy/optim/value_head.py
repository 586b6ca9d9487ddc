"""How an optimizer treats a value head differently from the body below it.

A head on a policy's body has its own learning rate. In a critic's warm-up, the first updates train only the new head.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightrl.strategy.optim.hooks import UpdateHook, attach
from lightrl.strategy.optim.parameter_kinds import HEAD_NAMES

_STEPS_LEFT = "frozen_steps"  # key of a parameter group


def has_value_head(model: nn.Module) -> bool:
    """Returns whether a module of the model has the name of a value head."""
    return bool(_head_parameters(model))


def set_up_value_head(optimizer: Optimizer, model: nn.Module, lr: float | None, frozen_steps: int) -> None:
    """Gives the value head its own rate unless it is None, and freezes all other groups for some first updates."""
    if lr is not None:
        set_head_rate(optimizer, model, lr)
    if frozen_steps:
        freeze_all_but_value_head(optimizer, model, frozen_steps)


def set_head_rate(optimizer: Optimizer, model: nn.Module, lr: float) -> None:
    """Gives the value head parameter groups of its own with this rate. Call it before a schedule is built."""
    for group, is_head in _split(optimizer, model):
        if is_head:
            group["lr"] = lr * group.get("lr_scale", 1.0)


def freeze_all_but_value_head(optimizer: Optimizer, model: nn.Module, steps: int) -> None:
    """Gives the value head parameter groups of its own, and freezes all others for `steps` updates."""
    if steps < 1:
        raise ValueError(f"critic_warmup_steps is {steps}: the warm-up needs at least 1.")
    for group, is_head in _split(optimizer, model):
        group[_STEPS_LEFT] = 0 if is_head else steps
    attach(optimizer, HeadWarmup())


class HeadWarmup(UpdateHook):
    """Counts down the frozen steps of parameter groups and keeps frozen groups from moving."""

    def reported_rates(self, optimizer: Optimizer, rates: list[float]) -> list[float]:
        """Reports a rate of 0 for frozen groups."""
        return [0.0 if steps_left(group) else rate for group, rate in zip(optimizer.param_groups, rates, strict=True)]

    def before_clip(self, optimizer: Optimizer) -> None:
        drop_frozen_gradients(optimizer)

    def after_update(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        for group in optimizer.param_groups if is_finite else ():
            if steps_left(group):
                group[_STEPS_LEFT] -= 1

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {"frozen_steps": [steps_left(group) for group in optimizer.param_groups]}

    def restore(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Continues a warm-up from a checkpoint, unless the optimizer's groups differ from the checkpoint's."""
        saved = state.get("frozen_steps", [])
        if len(saved) == len(optimizer.param_groups):
            for group, steps in zip(optimizer.param_groups, saved, strict=True):
                group[_STEPS_LEFT] = steps


def steps_left(group: dict[str, object]) -> int:
    """Returns the number of updates for which a parameter group stays frozen."""
    left = group.get(_STEPS_LEFT, 0)
    assert isinstance(left, int)
    return left


def drop_frozen_gradients(optimizer: Optimizer) -> None:
    """Drops the gradients of frozen groups, since an optimizer leaves parameters without a gradient unchanged."""
    for group in optimizer.param_groups:
        if steps_left(group):
            for parameter in group["params"]:
                parameter.grad = None


def _head_parameters(model: nn.Module) -> set[int]:
    return {id(item) for name, item in model.named_parameters() if set(name.split(".")) & set(HEAD_NAMES)}


def _split(optimizer: Optimizer, model: nn.Module) -> list[tuple[dict[str, Any], bool]]:
    """Splits every group in two; returns (group, whether it is the value head's), the body's before the head's."""
    head = _head_parameters(model)
    if not head:
        raise ValueError(f"{type(model).__name__} has no value head: none of its modules is named {HEAD_NAMES}.")
    groups, optimizer.param_groups = optimizer.param_groups, []
    result = []
    for is_head in (False, True):
        for group in groups:
            chosen = [item for item in group["params"] if (id(item) in head) is is_head]
            if chosen:
                optimizer.add_param_group({**group, "params": chosen})
                result.append((optimizer.param_groups[-1], is_head))
    return result
