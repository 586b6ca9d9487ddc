"""WeightAverage: an exponential moving average of a model's weights (EMA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.strategy.layout.plain import PlainLayout, SavedTensors
from lightrl.strategy.optim.hooks import UpdateHook


class WeightAverage:
    """Averages this rank's part of each weight in float32. It starts at the given weights, without bias correction.

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
        """Adds the weights after an update to the average."""
        for name, average in self.shards.items():
            average.lerp_(shards[name], 1 - self.decay)

    @torch.no_grad()
    def restart(self, shards: Mapping[str, Tensor]) -> None:
        """Starts anew with these weights as the average."""
        for name, average in self.shards.items():
            average.copy_(shards[name])


class AverageOfModel(UpdateHook):
    """Keeps the average of a model's trained weights, and lends it to the model."""

    def __init__(
        self, model: nn.Module, layout: PlainLayout, decay: float, *, before_writing: Callable[[nn.Module], None]
    ) -> None:
        """Starts at the model's weights; before_writing is called before the model's parameters are changed."""
        self.model = model
        self._layout = layout
        self._before_writing = before_writing
        self._average = WeightAverage(self._shards(), decay)

    def after_update(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        if is_finite:
            self._average.update(self._shards())

    def tensors(self) -> list[Tensor]:
        return [*self._average.shards.values()]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Gives the model the average inside the context and its own weights back afterwards; a collective."""
        self._before_writing(self.model)
        own = {name: shard.clone() for name, shard in self._shards().items()}
        self._write(self._average.shards)
        try:
            yield
        finally:
            self._before_writing(self.model)
            self._write(own)

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {"has_average": True}

    def write_tensors(self, write: Callable[[str, Sequence[tuple[str, Tensor]]], None]) -> None:
        with self.lent():
            write("ema", [(name, self._layout.detached(item)) for name, item in self._trained()])

    def read_tensors(self, read: Callable[[str], SavedTensors], state: dict[str, Any]) -> None:
        """Reads the average through the model's weights, or restarts it from them if the checkpoint has no average."""
        if not state.get("has_average", False):
            self._average.restart(self._shards())
            return
        saved = read("ema")
        with self.lent():
            for name, parameter in self._trained():
                if name not in saved.names:
                    raise ValueError(f"The checkpoint holds no average of {name}, which trains here.")
                self._layout.read_into(self._layout.detached(parameter), saved, name)
            self._average.restart(self._shards())

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, item) for name, item in sorted(self.model.named_parameters()) if item.requires_grad]

    def _shards(self) -> dict[str, Tensor]:
        return {name: self._layout.shard(parameter) for name, parameter in self._trained()}

    def _write(self, shards: Mapping[str, Tensor]) -> None:
        for name, parameter in self._trained():
            self._layout.write_shard(parameter, shards[name])
