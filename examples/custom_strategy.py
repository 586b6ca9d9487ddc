"""A strategy of your own: --strategy examples.custom_strategy:ReplicatedStrategy

Every rank holds the whole model, and one all-reduce per optimizer step makes the gradients equal. For a model that fits
on each device this moves less than sharding does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightrl.strategy.torch_native import TorchStrategy


class ReplicatedStrategy(TorchStrategy):
    @property
    def averaging_ranks(self) -> int:
        return self.comm.world  # reduce_gradients below takes a mean; the scale of the loss makes up for its division

    def prepare_model(self, model: nn.Module) -> nn.Module:
        for _, tensor in [*sorted(model.to(self.device).named_parameters()), *sorted(model.named_buffers())]:
            self.comm.broadcast_tensor(tensor.data)
        self.set_up_computation(model)  # --dtype bfloat16 and --gradient_checkpointing
        return model

    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        # Every rank must contribute every gradient, even if its samples did not use the parameter.
        own = {str(i): torch.zeros_like(p) if p.grad is None else p.grad for i, p in enumerate(parameters)}
        for parameter, mean in zip(parameters, self.comm.all_reduce(own).values(), strict=True):
            parameter.grad = mean
