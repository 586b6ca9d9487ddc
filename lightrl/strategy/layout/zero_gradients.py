"""Gradients for DeepSpeed's ZeRO stages 1 and 2, of the same parameters and in the same order on every rank.

DeepSpeed adds up buckets of gradients by position, whatever a rank has put into them. But a rank has no gradient of an
expert, a module of its own, that no token chose, and experts that run in another order get theirs in another order.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def fill_up(parameters: Iterable[Tensor]) -> None:
    """Gives parameters without a gradient one of zeros, as which DeepSpeed's flat tensors count a missing one."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class OrderedGradients:
    """Reduces gradients in place of DeepSpeed's hooks at stage 2, from the last parameter of the model to the first.

    A backward has them in about this order, so that few whole gradients have to wait. But a parameter without a
    gradient makes all earlier ones wait for the end of the backward.
    """

    def __init__(self, model: nn.Module, engine: Any) -> None:
        """Takes the gradients over from the hooks, until the engine is destroyed."""
        self._engine = engine
        zero = engine.optimizer
        places = {parameter: place for place, parameter in enumerate(model.parameters())}
        grouped = [(parameter, index) for index, group in enumerate(zero.bit16_groups) for parameter in group]
        self._order = sorted(grouped, key=lambda pair: places.get(pair[0], -1), reverse=True)
        self._next = 0  # the first place in the order whose gradient this backward has not reduced
        engine.enable_backward_allreduce = False  # finish_backward() does it, when the buckets are complete
        for hook in zero._grad_acc_hooks:
            hook.remove()
        zero._grad_acc_hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, place))
            for place, (parameter, _) in enumerate(self._order)
        ]

    def _arrived(self, place: int, _: Tensor) -> None:
        if place < self._next:
            self._reduce(place)  # fails, as DeepSpeed takes only one gradient of a parameter in a backward
        while self._next < len(self._order) and self._order[self._next][0].grad is not None:
            self._reduce(self._next)
            self._next += 1

    def _reduce(self, place: int) -> None:
        self._engine.optimizer.process_gradients(*self._order[place])

    def finish_backward(self) -> None:
        """Reduces the remaining gradients and zeros for missing ones; every rank must call this after a backward."""
        for place in range(self._next, len(self._order)):
            fill_up([self._order[place][0]])  # one at a time: the reduction moves it into a bucket
            self._reduce(place)
        self._next = 0
        self._engine.allreduce_gradients()
