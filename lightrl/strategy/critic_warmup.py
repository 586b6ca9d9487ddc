"""Critic warm-up: for its first steps an optimizer trains the new value head only, and leaves the rest as it was."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

_HEAD_NAMES = ("value_head", "v_head", "critic_head", "score")
_STEPS_LEFT = "frozen_steps"  # key of a parameter group


def freeze_all_but_value_head(optimizer: Optimizer, model: nn.Module, steps: int) -> None:
    """Splits every parameter group in the value head's part, which trains, and the rest, frozen for `steps` updates."""
    if steps < 1:
        raise ValueError(f"critic_warmup_steps is {steps}: the warm-up needs at least 1.")
    head = {id(item) for name, item in model.named_parameters() if set(name.split(".")) & set(_HEAD_NAMES)}
    if not head:
        raise ValueError(f"{type(model).__name__} has no value head: none of its modules is named {_HEAD_NAMES}.")
    groups, optimizer.param_groups = optimizer.param_groups, []
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for is_head in (True, False):
            chosen = [item for item in group["params"] if (id(item) in head) is is_head]
            if chosen:
                optimizer.add_param_group({**settings, "params": chosen, _STEPS_LEFT: 0 if is_head else steps})


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
