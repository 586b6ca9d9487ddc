"""A strategy is added in one file: this one defines a toy, runs it by its path and replaces a part that it holds."""

from __future__ import annotations

import torch
from torch import nn

from lightrl.config import GRPOConfig
from lightrl.strategy import TorchStrategy, create_strategy
from lightrl.strategy.layout.plain import PlainLayout
from lightrl.testing.tiny_training import parameters, tiny_policy, train


class CountingLayout(PlainLayout):
    """Counts the whole tensors that are read."""

    num_gathered = 0

    def gather_named(self, named, dtype=None):  # type: ignore[no-untyped-def]
        for pair in super().gather_named(named, dtype):
            self.num_gathered += 1
            yield pair


class ToyStrategy(TorchStrategy):
    """Keeps the model where it is, and turns every gradient around."""

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return model

    def make_layout(self) -> PlainLayout:
        return CountingLayout(self.comm)

    def reduce_gradients(self, model: nn.Module, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None if parameter.grad is None else -parameter.grad


def test_a_toy_strategy_in_one_file() -> None:
    losses = {}
    for name in ("single", f"{__name__}:ToyStrategy"):
        strategy = create_strategy(GRPOConfig(strategy=name, lr=1e-2))
        strategy.setup_distributed()
        policy = strategy.prepare_trained(tiny_policy()).model
        losses[name] = [train(strategy, policy, 0).loss for _ in range(3)]
        names = parameters(strategy, policy)
    assert isinstance(strategy, ToyStrategy)
    assert isinstance(strategy.layout, CountingLayout)
    assert strategy.layout.num_gathered == len(names)
    down, up = losses.values()
    assert down[2] < down[0] < up[2]
    assert down[0] == up[0]
