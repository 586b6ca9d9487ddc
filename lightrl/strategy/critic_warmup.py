"""What an optimizer does otherwise with a value head than with the body below it.

Critic warm-up: for its first steps it trains the new head only, and leaves the rest as it was. A head on a policy's
body has a learning rate of its own.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

HEAD_NAMES = ("value_head", "v_head", "critic_head", "score")
_STEPS_LEFT = "frozen_steps"  # key of a parameter group


def has_value_head(model: nn.Module) -> bool:
    return bool(_head_parameters(model))


def freeze_all_but_value_head(optimizer: Optimizer, model: nn.Module, steps: int) -> None:
    """Splits every parameter group in the value head's part, which trains, and the rest, frozen for `steps` updates."""
    if steps < 1:
        raise ValueError(f"critic_warmup_steps is {steps}: the warm-up needs at least 1.")
    for group, is_head in _split(optimizer, model):
        group[_STEPS_LEFT] = 0 if is_head else steps


def set_head_rate(optimizer: Optimizer, model: nn.Module, lr: float) -> None:
    """Splits the same way; the head's groups learn at this rate. Call it before a schedule is built."""
    for group, is_head in _split(optimizer, model):
        if is_head:
            group["lr"] = lr * group.get("lr_scale", 1.0)


def _head_parameters(model: nn.Module) -> set[int]:
    return {id(item) for name, item in model.named_parameters() if set(name.split(".")) & set(HEAD_NAMES)}


def _split(optimizer: Optimizer, model: nn.Module) -> list[tuple[dict[str, Any], bool]]:
    """Parts every group in two: (group, whether it is the value head's), the body's before the head's."""
    head = _head_parameters(model)
    if not head:
        raise ValueError(f"{type(model).__name__} has no value head: none of its modules is named {HEAD_NAMES}.")
    groups, optimizer.param_groups = optimizer.param_groups, []
    found = []
    for is_head in (False, True):
        for group in groups:
            chosen = [item for item in group["params"] if (id(item) in head) is is_head]
            if chosen:
                optimizer.add_param_group({**group, "params": chosen})
                found.append((optimizer.param_groups[-1], is_head))
    return found


def drop_frozen_gradients(optimizer: Optimizer) -> None:
    """An optimizer passes over a parameter without a gradient: no update, no decay, no moments of it."""
    for group in optimizer.param_groups:
        if steps_left(group):
            for parameter in group["params"]:
                parameter.grad = None


def steps_left(group: dict[str, object]) -> int:
    left = group.get(_STEPS_LEFT, 0)
    assert isinstance(left, int)
    return left


def count_step(optimizer: Optimizer) -> None:
    """After an update that was taken."""
    for group in optimizer.param_groups:
        if steps_left(group):
            group[_STEPS_LEFT] -= 1


def state_of(optimizer: Optimizer) -> list[int]:
    return [steps_left(group) for group in optimizer.param_groups]


def restore(optimizer: Optimizer, left: list[int]) -> None:
    """Goes on with a warm-up that a checkpoint was saved in; another grouping keeps what it was built with."""
    if len(left) == len(optimizer.param_groups):
        for group, steps in zip(optimizer.param_groups, left, strict=True):
            if _STEPS_LEFT in group:
                group[_STEPS_LEFT] = steps
