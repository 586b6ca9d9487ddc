"""A strategy of your own: --strategy examples.custom_strategy:ReplicatedStrategy

Every rank holds the whole model, and one all-reduce per optimizer step makes the gradients equal. For a model that fits
on each device this moves less than sharding does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightrl.strategy.base import OptimizerStep
from lightrl.strategy.torch_native import TorchStrategy


class ReplicatedStrategy(TorchStrategy):
    @property
    def averaging_ranks(self) -> int:
        return self.comm.world  # optimizer_step below takes a mean; train_batch undoes its division

    def prepare_model(self, model: nn.Module) -> nn.Module:
        if self.options.dtype != "float32":
            raise ValueError(f"ReplicatedStrategy computes in float32; --dtype is {self.options.dtype}.")
        model.to(self.device)
        for _, tensor in [*sorted(model.named_parameters()), *sorted(model.named_buffers())]:
            self.comm.broadcast_tensor(tensor.data)
        return model

    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> OptimizerStep:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        # Every rank must bring every gradient, also one whose samples did not touch the parameter.
        own = {str(i): torch.zeros_like(p) if p.grad is None else p.grad for i, p in enumerate(trained)}
        for parameter, mean in zip(trained, self.all_reduce(own).values(), strict=True):
            parameter.grad = mean
        return super().optimizer_step(optimizer, model, scheduler, name, **kwargs)
