"""Completes a strategy that implements only the five abstract methods of other trainers' base class.

Its model is whole on every rank. Its backward() and optimizer_step() know nothing of weights, ranks or results;
PageSteps wraps them to add these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.comm import Comm
from lightrl.config import StrategyOptions
from lightrl.strategy.computation import compute_in_bfloat16, enable_gradient_checkpointing
from lightrl.strategy.layout.adapters import MergedWeights
from lightrl.strategy.layout.materialize import broadcast_from_main
from lightrl.strategy.layout.plain import PlainLayout, Weights, has_adapters
from lightrl.strategy.optim.optimizers import TrainedModels, clip_gradients
from lightrl.strategy.results import OptimizerStep


class Stepping(Protocol):
    """The parts of the strategy that is completed."""

    comm: Comm
    device: torch.device
    layout: PlainLayout

    @property
    def options(self) -> StrategyOptions: ...
    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: Any) -> None: ...
    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> Any: ...
    def unwrap_model(self, model: Any) -> nn.Module: ...
    @property
    def trained(self) -> TrainedModels: ...


def place_whole(strategy: Stepping, model: nn.Module) -> nn.Module:
    """Puts the whole model with rank 0's weights on every rank, and completes the strategy's backward and step."""
    broadcast_from_main(model, strategy.device, strategy.comm)
    if strategy.options.gradient_checkpointing:
        enable_gradient_checkpointing(strategy.unwrap_model(model))
    if strategy.options.dtype == "bfloat16":
        compute_in_bfloat16(model, strategy.device)
    own = vars(strategy)
    if "backward" not in own:  # wrapped on the object, not on its class: a subclass may call its parent's method inside
        steps = PageSteps(strategy)
        own.update(backward=steps.backward, optimizer_step=steps.optimizer_step)
    return model


def whole_parameters(strategy: Stepping, model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, whole tensor) of a model that is whole on every rank."""
    unwrapped, layout = strategy.unwrap_model(model), strategy.layout
    named = sorted(unwrapped.named_parameters())
    weights = MergedWeights(unwrapped, layout) if has_adapters(unwrapped) else Weights(named, layout)
    return layout.gather_named(weights.tensors(), dtype)


class PageSteps:
    """Gives backward() its weight, sums gradients over the ranks, and reports what optimizer_step() did.

    Each backward() sums its own gradient at once, so that the author's code clips the whole gradient. If that code also
    takes a mean over the ranks, nothing changes, since all ranks then have the same gradient.
    """

    def __init__(self, strategy: Stepping) -> None:
        self._strategy = strategy
        self._backward, self._step = strategy.backward, strategy.optimizer_step

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: Any) -> None:
        """Adds the gradient of the loss times `weight`, summed over the ranks; without a weight, the mean over them."""
        weight = kwargs.pop("weight", None)
        comm = self._strategy.comm
        scaled = loss * (1 / comm.world if weight is None else weight)
        if comm.world == 1:
            self._backward(scaled, model, optimizer, **kwargs)
            return
        parameters = _parameters(optimizer)
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._backward(scaled, model, optimizer, **kwargs)
        _sum_gradients(parameters, comm)
        for parameter, before in zip(parameters, earlier, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad

    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> OptimizerStep:
        """Runs the author's step unless the norm is not finite; returns its own report if it has one."""
        is_boundary = kwargs.pop("is_boundary", None)
        hooks = self._strategy.trained.hooks_of(optimizer)
        rates = self._strategy.trained.rates(optimizer)
        if is_boundary is False:
            return OptimizerStep(grad_norm=0.0, lr_list=rates, stepped=False)
        for hook in hooks:
            hook.before_clip(optimizer)
        norm = float(clip_gradients(_parameters(optimizer), 0))
        is_finite = self._strategy.comm.agree(math.isfinite(norm))
        epoch = getattr(scheduler, "last_epoch", None)
        result = self._step(optimizer, model, scheduler, name, **kwargs) if is_finite else None
        if getattr(scheduler, "last_epoch", None) != epoch or not is_finite:
            # So that step_lr_scheduler() does not step it again, nor for an update that was skipped.
            self._strategy.trained.scheduled.add(optimizer)
        if not is_finite:
            optimizer.zero_grad(set_to_none=True)
        for hook in hooks:
            hook.after_update(optimizer, is_finite=is_finite)
        if isinstance(result, OptimizerStep):
            return result
        return OptimizerStep(grad_norm=norm, lr_list=rates, skipped=not is_finite)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def _sum_gradients(parameters: list[Tensor], comm: Comm) -> None:
    """Sums the gradients; one that no rank has stays None, so that the optimizer leaves its parameter alone."""
    is_used = comm.all_reduce(torch.tensor([parameter.grad is not None for parameter in parameters]).int(), "max")
    for parameter, used in zip(parameters, is_used.tolist(), strict=True):
        if used:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = comm.all_reduce(own, "sum")
