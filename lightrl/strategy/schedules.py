"""Learning-rate schedules as a factor of the peak rate. What a step is, --optim.schedule_unit says."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightrl.config import OptimConfig


def lr_factor(step: int, *, kind: str, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """Factor after `step` finished ones: (step + 1) / warmup_steps in the warm-up, then the schedule."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if kind not in ("linear", "cosine"):
        raise ValueError(f"Unknown learning-rate schedule {kind!r}. Choose one of constant, linear, cosine.")
    shape = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return min_ratio + (1 - min_ratio) * shape


def build_lr_scheduler(optimizer: Optimizer, config: OptimConfig, total_steps: int) -> LambdaLR:
    """The schedule that the options name, over total_steps of its units.

    A group's own factor of the rate (--optim.lr_scales) holds at every step, at the end of the schedule too.
    """
    first = optimizer.param_groups[0]
    peak = float(first["lr"]) / (first.get("lr_scale", 1.0) or 1.0)
    factor = partial(
        lr_factor,
        kind=config.schedule,
        warmup_steps=config.warmup_steps or int(config.warmup_ratio * total_steps),
        total_steps=total_steps,
        min_ratio=config.min_lr / peak if config.min_lr and peak else config.min_lr_ratio,
    )
    return LambdaLR(optimizer, factor)
