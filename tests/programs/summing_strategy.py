"""A strategy that sums gradients over the ranks, where most back ends average them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightrl.strategy import TorchStrategy


class SummingStrategy(TorchStrategy):
    """Keeps the whole model on every rank. averaging_ranks stays 1, because nothing divides."""

    def prepare_model(self, model: nn.Module) -> nn.Module:
        for _, tensor in [*sorted(model.to(self.device).named_parameters()), *sorted(model.named_buffers())]:
            self.comm.broadcast_tensor(tensor.data)
        self.set_up_computation(model)
        return model

    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        whole = [torch.zeros_like(item) if item.grad is None else item.grad for item in parameters]
        total = self.comm.all_reduce(torch.cat([item.flatten() for item in whole]), "sum")
        for parameter, part in zip(parameters, total.split([item.numel() for item in whole]), strict=True):
            parameter.grad = part.view_as(parameter)
