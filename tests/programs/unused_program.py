"""Trains on two ranks whose samples use different experts; prints the norms and writes the trained weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightrl.config import DeepSpeedConfig, StrategyOptions
from lightrl.strategy.base import StrategyBase
from lightrl.strategy.deepspeed import DeepSpeedStrategy
from lightrl.strategy.fsdp import FSDPStrategy

NUM_EXPERTS = 4
# Two micro-batches of each rank, with two samples of width 2; the first number chooses the expert. The last one of four
# is never used, and in the second update neither is that of number 2. In the third, the
# ranks use two in different orders.
UPDATES = (
    (([[0.0, 1.0], [4.0, 2.0]], [[0.2, 0.5], [0.1, 1.0]]), ([[1.0, 0.5], [5.0, 1.0]], [[2.0, 3.0], [1.5, 0.0]])),
    (([[0.5, 2.0], [0.0, 1.0]], [[0.3, 1.0], [0.9, 0.2]]), ([[1.2, 2.0], [1.0, 1.0]], [[1.1, 0.7], [1.4, 0.3]])),
    (([[0.1, 1.0], [1.0, 2.0]], [[2.0, 0.5], [0.7, 1.0]]), ([[1.2, 0.5], [0.0, 1.0]], [[0.4, 3.0], [2.1, 0.0]])),
)


class Layer(nn.Module):
    """Adds what one of its experts, modules of their own, makes of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(NUM_EXPERTS))

    def forward(self, samples: Tensor) -> Tensor:
        chosen = samples[:, 0].long() % NUM_EXPERTS
        result = samples
        for index in dict.fromkeys(chosen.tolist()):
            rows = (chosen == index)[:, None]
            result = torch.where(rows, result + self.experts[index](samples), result)
        return result


class Mixture(nn.Module):
    """A layer of experts, and a tower that samples without images do not run."""

    def __init__(self, units: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.tower = nn.ModuleList([nn.Linear(2, 2)])
        self._no_split_modules = units
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, samples: Tensor) -> Tensor:
        result: Tensor = self.layers[0](samples)
        return result


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs**2).mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that moves a parameter even if its gradient is zero."""
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def main(strategy: StrategyBase, path: str, units: list[str], *, updates: Sequence[Any] = UPDATES) -> None:
    strategy.setup_distributed()
    model: nn.Module = Mixture(units)
    if isinstance(strategy, DeepSpeedStrategy):
        strategy._deepspeed.utils.set_z3_leaf_modules(model, [Layer])  # as docs/strategies.md says; for stage 3
    model = strategy.prepare_model(model)
    strategy.register(model, optimizer_of(model))
    for update in updates:
        data = [torch.tensor(samples, requires_grad=True) for samples in update[strategy.comm.rank]]
        result = strategy.train_batch(data, lambda outputs, _: loss_of(outputs), len)
        if strategy.comm.is_main:
            print(f"norm {result.grad_norm:.5f}", flush=True)
    weights = strategy.get_model_state_dict(cpu_offload=True)
    if strategy.comm.is_main:
        torch.save(weights, path)
    strategy.close()


def zero_strategy(stage: int, offload: bool) -> StrategyBase:
    config = DeepSpeedConfig(zero_stage=stage, offload_optimizer=offload, param_persistence_threshold=0)
    return DeepSpeedStrategy(0, 0.0, 1, 4, StrategyOptions(exact_batches=True, deepspeed=config))


if __name__ == "__main__":
    path, units, *options = sys.argv[1:]
    if options[:1] == ["--zero"]:
        strategy = zero_strategy(int(options[1]), "--offload" in options)
    else:
        strategy = FSDPStrategy(0, 0.0, 1, 4)
    if options == ["--old_torch"]:
        delattr(FSDPModule, "set_reduce_scatter_unused_params")
    # In the second update, all gradients have one size, so that torch does not notice what it adds up.
    main(strategy, path, units.split(), updates=UPDATES[1:] if options == ["--old_torch"] else UPDATES)
