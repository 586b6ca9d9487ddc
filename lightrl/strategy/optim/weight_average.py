"""AverageOfModel: an exponential moving average of a model's weights (EMA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.strategy.layout.plain import PlainLayout, SavedTensors
from lightrl.strategy.optim.hooks import UpdateHook


class AverageOfModel(UpdateHook):
    """Keeps the average of a model's trained weights, this rank's part in float32, and lends it to the model.

    It starts at the model's weights, without bias correction. After each update:
    average = decay x average + (1 - decay) x weight.
    """

    def __init__(
        self, model: nn.Module, layout: PlainLayout, decay: float, *, before_writing: Callable[[nn.Module], None]
    ) -> None:
        """Starts at the model's weights; before_writing is called before the model's parameters are changed."""
        self.model = model
        self._layout = layout
        self._before_writing = before_writing
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        for name, shard in self._shards().items():
            if shard.dtype != torch.float32:
                raise ValueError(f"--ema_decay needs float32 weights, but {name} is {shard.dtype}.")
            self._average[name] = shard.detach().clone()

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        if is_finite:
            shards = self._shards()
            for name, average in self._average.items():
                average.lerp_(shards[name], 1 - self.decay)

    def tensors(self) -> list[Tensor]:
        return [*self._average.values()]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Gives the model the average inside the context and its own weights back afterwards; a collective."""
        self._before_writing(self.model)
        own = {name: shard.clone() for name, shard in self._shards().items()}
        self._write(self._average)
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
            self._restart()
            return
        saved = read("ema")
        with self.lent():
            for name, parameter in self._trained():
                if name not in saved.names:
                    raise ValueError(f"The checkpoint holds no average of {name}, which trains here.")
                self._layout.read_into(self._layout.detached(parameter), saved, name)
            self._restart()

    @torch.no_grad()
    def _restart(self) -> None:
        """Takes the weights as the average."""
        shards = self._shards()
        for name, average in self._average.items():
            average.copy_(shards[name])

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, item) for name, item in sorted(self.model.named_parameters()) if item.requires_grad]

    def _shards(self) -> dict[str, Tensor]:
        return {name: self._layout.shard(parameter) for name, parameter in self._trained()}

    def _write(self, shards: Mapping[str, Tensor]) -> None:
        for name, parameter in self._trained():
            self._layout.write_shard(parameter, shards[name])
