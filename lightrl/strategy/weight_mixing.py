"""mix_into: moves the weights of one model towards those of another, each rank its own part."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from lightrl.models.policy import persistent_buffers
from lightrl.strategy.layout.plain import PlainLayout
from lightrl.strategy.optim.optimizers import TrainedModels


class Placing(Protocol):
    """The parts of a strategy that mixing needs."""

    @property
    def trained(self) -> TrainedModels: ...

    def after_forward_only(self, model: nn.Module) -> None: ...

    @property
    def layout(self) -> PlainLayout: ...


@torch.no_grad()
def mix_into(target: nn.Module, source: nn.Module, share: float, strategy: Placing) -> None:
    """Sets target to share x source + (1 - share) x target; every rank must call it.

    Persistent buffers are mixed too, those of integers copied. With share 1 the result is a copy, bit for bit.

    Args:
        target: a model that the strategy has placed.
        source: a model of the same kind, placed likewise, so that a rank holds the same parts of both. It may have
            further parameters, such as a value head.
    """
    layout = strategy.layout
    strategy.trained.require_on_device(target, source)
    for model in (target, source):
        strategy.after_forward_only(model)
    parameters, buffers = dict(source.named_parameters()), dict(persistent_buffers(source))
    for name, parameter in sorted(target.named_parameters()):
        layout.write_shard(parameter, _mixed(layout.shard(parameter), layout.shard(parameters[name]), share))
    for name, buffer in persistent_buffers(target):
        buffer.copy_(_mixed(buffer, buffers[name], share))
    layout.finish_writing(target)


def _mixed(old: Tensor, new: Tensor, share: float) -> Tensor:
    new = new.to(old)  # their types and devices may differ
    return torch.lerp(old, new, share) if share < 1 and old.is_floating_point() else new
