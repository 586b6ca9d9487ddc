"""DDP: the whole model on every rank, gradients averaged once per update; the plain reference for several ranks.

torch's DistributedDataParallel is not used: it requires every parameter in every backward and one forward per backward,
and its wrapper renames the parameters. Its one advantage would be to overlap the reduction with the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightrl.strategy.layout.buckets import buckets
from lightrl.strategy.layout.materialize import broadcast_from_main
from lightrl.strategy.layout.plain import PlainLayout
from lightrl.strategy.torch_native import TorchStrategy

_BUCKET_BYTES = 64 << 20  # reduced at once; bounds the copy that a reduction makes


class DDPStrategy(TorchStrategy):
    """Keeps parameters, gradients and optimizer states whole on every rank."""

    def make_layout(self) -> PlainLayout:
        """Returns the layout of whole parameters."""
        return PlainLayout(self.comm)

    @property
    def averaging_ranks(self) -> int:
        """All ranks, over which reduce_gradients() takes the mean."""
        return self.comm.world

    @property
    def materializes_weights(self) -> bool:
        """Only rank 0 loads weights; the others receive them."""
        return self.comm.is_main

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Copies rank 0's weights to every rank; the other ranks' model may be on the meta device."""
        broadcast_from_main(model, self.device, self.comm)
        self.set_up_computation(model)
        return model

    @torch.no_grad()
    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        """Averages gradients in the optimizer's order; unlike the backward's order, it is the same on every rank.

        A gradient that no rank has stays None, or momentum and weight decay would move its parameter.
        """
        if self.comm.world == 1:
            return
        is_used = self.comm.all_reduce(torch.tensor([item.grad is not None for item in parameters]).int(), "max")
        parameters = [item for item, used in zip(parameters, is_used.tolist(), strict=True) if used]
        for parameter in parameters:
            if parameter.grad is None:  # used by another rank's samples
                parameter.grad = torch.zeros_like(parameter)
        named = ((str(index), parameter) for index, parameter in enumerate(parameters))
        for bucket in buckets(named, lambda parameter: parameter.nbytes, _BUCKET_BYTES):
            means = self.comm.all_reduce({name: parameter.grad for name, parameter in bucket})
            for name, parameter in bucket:
                parameter.grad = means[name]
