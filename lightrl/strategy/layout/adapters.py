"""MergedWeights: the parameters of a model that has LoRA adapters, as if it never had any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from lightrl.models import lora
from lightrl.strategy.layout.plain import NamedShard, PlainLayout, Weights
from lightrl.strategy.saving.state_files import write_folder_hash


class MergedWeights(Weights):
    """The parameters with LoRA adapters added to those that have one; these are copies, made one at a time."""

    def __init__(self, model: nn.Module, layout: PlainLayout) -> None:
        super().__init__(sorted(lora.plain_parameters(model)), layout)
        self._adapters = lora.adapters_of(model)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor to be gathered); a collective."""
        for name, parameter in self.named:
            if name in self._adapters:
                yield name, self.layout.add(parameter, self._delta(name))
            else:
                yield name, self.layout.detached(parameter)

    def shards(self) -> Iterator[NamedShard]:
        """Yields this rank's values of every parameter; a collective."""
        for name, parameter, shard in super().shards():
            if name in self._adapters:
                shard = shard + self.layout.shard_of_whole(parameter, self._delta(name).to(shard.device))
            yield NamedShard(name, parameter, shard)

    @torch.no_grad()
    def _delta(self, name: str) -> Tensor:
        """Returns the whole term that an adapter adds to its weight, on every rank; a collective."""
        adapter = self._adapters[name]
        parts = [("down", self.layout.detached(adapter.down)), ("up", self.layout.detached(adapter.up))]
        return adapter.delta(**{part: whole.clone() for part, whole in self.layout.gather_named(parts)})


def save_adapter(model: nn.Module, layout: PlainLayout, path: Path) -> None:
    """Writes a folder that peft loads; every rank must call it, rank 0 writes."""
    host = lora.host_of(model)
    assert host is not None
    named = [(name, layout.detached(parameter)) for name, parameter in lora.trained_parameters(host)]
    is_main = layout.comm.is_main
    whole = {name: tensor.cpu() if is_main else tensor for name, tensor in layout.gather_named(named)}
    if is_main:
        lora.save_adapter(host, whole, path)
        write_folder_hash(path)
    layout.comm.barrier()
