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
        named = ((str(index), parameter) for index, parameter in enumerate(parameters))
        for bucket in buckets(named, lambda parameter: parameter.nbytes, _BUCKET_BYTES):
            has_gradient = [parameter.grad is not None for _, parameter in bucket]
            own = {name: torch.zeros_like(item) if item.grad is None else item.grad for name, item in bucket}
            means = self.comm.all_reduce({**own, "has_gradient": bucket[0][1].new_tensor(has_gradient)})
            for (name, parameter), share in zip(bucket, means["has_gradient"].tolist(), strict=True):
                parameter.grad = means[name] if share else None
