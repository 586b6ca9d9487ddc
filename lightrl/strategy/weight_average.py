"""An exponential moving average of weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class WeightAverage:
    """Of this rank's part of each weight, in float32. It starts as the weights that it is given, without a correction.

    After each update: average = decay x average + (1 - decay) x weight.
    """

    def __init__(self, shards: Mapping[str, Tensor], decay: float) -> None:
        for name, shard in shards.items():
            if shard.dtype != torch.float32:
                raise ValueError(f"--ema_decay needs float32 weights, but {name} is {shard.dtype}.")
        self.decay = decay
        self.shards = {name: shard.detach().clone() for name, shard in shards.items()}

    @torch.no_grad()
    def update(self, shards: Mapping[str, Tensor]) -> None:
        for name, average in self.shards.items():
            average.lerp_(shards[name], 1 - self.decay)

    @torch.no_grad()
    def restart(self, shards: Mapping[str, Tensor]) -> None:
        for name, average in self.shards.items():
            average.copy_(shards[name])
