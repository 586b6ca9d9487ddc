"""The whole model on every rank; gradients are averaged once per update. The plain reference among several ranks.

torch's DistributedDataParallel is not used: it must see every parameter in every backward and one forward per backward,
and its wrapper renames the parameters. What it would give is the overlap of the reduction with the backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightrl.strategy.single import compute_in_bfloat16, enable_gradient_checkpointing
from lightrl.strategy.torch_native import TorchStrategy, broadcast_from_main

_BUCKET_BYTES = 64 << 20  # reduced at once; it bounds the copy that a reduction makes


class DDPStrategy(TorchStrategy):
    """Every rank holds parameters, gradients and optimizer states."""

    @property
    def averaging_ranks(self) -> int:
        return self.comm.world

    @property
    def materializes_weights(self) -> bool:
        return self.comm.is_main

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Rank 0's weights on every rank; the other ranks' model may be on the meta device."""
        enable_gradient_checkpointing(self.unwrap_model(model), self.options.gradient_checkpointing)
        broadcast_from_main(model, self.device, self.comm)
        if self.options.dtype == "bfloat16":
            compute_in_bfloat16(model, self.device)
        return model

    @torch.no_grad()
    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        """In the optimizer's order, which is that of every rank, whatever order the backward had."""
        if self.comm.world == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:  # a sample of another rank may have touched it
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets(parameters):
            means = self.comm.all_reduce({str(place): item.grad for place, item in enumerate(bucket)})
            for parameter, mean in zip(bucket, means.values(), strict=True):
                parameter.grad = mean


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
