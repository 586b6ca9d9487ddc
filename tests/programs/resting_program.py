"""Trains sharded models whose parts rest in some updates, or were frozen when they first ran."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from unused_program import loss_of, optimizer_of

from lightrl.strategy.fsdp import FSDPStrategy


class Resting(nn.Module):
    """A layer, and two parts that a sample may run: its first number is the index of one, or 2 for neither."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, samples: Tensor) -> Tensor:
        result: Tensor = self.layers[0](samples)
        chosen = int(samples[0, 0])
        return self.parts[chosen](result) if chosen < len(self.parts) else result


# The first part has a gradient in the first update only, and the other does not run before the last.
UPDATES = ([[0.0, 1.0]], [[2.0, 1.0]], [[1.0, 1.0]])


def rest(strategy: FSDPStrategy, path: str) -> None:
    """Trains on the updates, and writes the weights."""
    model = strategy.prepare_model(Resting())
    strategy.register(model, optimizer_of(model))
    for samples in UPDATES:
        strategy.train_batch([torch.tensor(samples)], lambda outputs, _: loss_of(outputs), len, model=model)
    weights = strategy.get_model_state_dict(cpu_offload=True)
    if strategy.comm.is_main:
        torch.save(weights, path)


def thaw(strategy: FSDPStrategy) -> None:
    """Trains layers that were frozen in the first forward, as adapters are that a reference switches off."""
    model = strategy.prepare_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    strategy.register(model, optimizer_of(model))
    model.requires_grad_(False)
    with torch.no_grad():
        model(torch.ones(1, 2))
    model.requires_grad_(True)
    result = strategy.train_batch([torch.ones(1, 2)], lambda outputs, _: loss_of(outputs), len, model=model)
    print(f"norm {result.grad_norm:.5f}", flush=True)


if __name__ == "__main__":
    strategy = FSDPStrategy(0, 0.0, 1, 2)
    strategy.setup_distributed()
    rest(strategy, sys.argv[1])
    thaw(strategy)
    strategy.close()
