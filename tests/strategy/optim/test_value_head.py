"""Critic warm-up: the head trains first, then all."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lightrl.config import StrategyOptions
from lightrl.strategy.optim.value_head import set_head_rate
from lightrl.strategy.torch_native import SingleStrategy


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4)
        self.value_head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.value_head(self.body(inputs))
        return values


def started() -> tuple[SingleStrategy, Critic, torch.optim.Optimizer]:
    strategy = SingleStrategy(0, 1.0, 1, 1, {"lr": 0.1, "critic_warmup_steps": 2, "optim": {"weight_decay": 0.1}})
    strategy.setup_distributed()
    model = Critic()
    optimizer = strategy.build_optimizer(model, enable_critic_warmup=True)
    strategy.register(model, optimizer)
    return strategy, model, optimizer


def step(strategy: SingleStrategy, model: Critic, optimizer: torch.optim.Optimizer) -> tuple[bool, bool, list[float]]:
    """Whether the body and the head moved, and the learning rates that were told."""
    before = [item.detach().clone() for item in (model.body.weight, model.value_head.weight)]
    strategy.backward(model(torch.ones(1, 3)).square().sum(), model, optimizer)
    rates = strategy.optimizer_step(optimizer, model, None).lr_list
    moved = [
        not torch.equal(old, new) for old, new in zip(before, (model.body.weight, model.value_head.weight), strict=True)
    ]
    return moved[0], moved[1], rates


def test_the_head_trains_alone_for_so_many_steps_then_everything(tmp_path: Path) -> None:
    strategy, model, optimizer = started()
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(item) for item in owned} == {id(item) for item in model.parameters()}
    assert len(owned) == 4
    # groups: weights and vectors of the body, weights and vectors of the head
    assert step(strategy, model, optimizer) == (False, True, [0.0, 0.0, 0.1, 0.1])
    strategy.backward(math.nan * model(torch.ones(1, 3)).sum(), model, optimizer)
    assert strategy.optimizer_step(optimizer, model, None).skipped  # and so does not count
    strategy.save_ckpt(model, str(tmp_path))
    again, other, other_optimizer = started()
    again.load_ckpt(other, str(tmp_path))
    for run in ((strategy, model, optimizer), (again, other, other_optimizer)):
        assert step(*run) == (False, True, [0.0, 0.0, 0.1, 0.1])
        assert step(*run) == (True, True, [0.1] * 4)
    assert torch.equal(model.body.weight, other.body.weight)


def test_a_rate_of_the_heads_own_is_multiplied_by_the_factor_of_its_name() -> None:
    model = Critic()
    parts = ((model.body, 0.1, 1.0), (model.value_head, 0.05, 0.5))
    optimizer = torch.optim.SGD([{"params": [*part.parameters()], "lr": lr, "lr_scale": x} for part, lr, x in parts])
    set_head_rate(optimizer, model, 0.4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_what_cannot_be_warmed_up_is_told() -> None:
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(critic_warmup_steps=2))
    with pytest.raises(ValueError, match="Linear has no value head: none of its modules is named"):
        strategy.build_optimizer(nn.Linear(2, 2), enable_critic_warmup=True)
    with pytest.raises(ValueError, match="critic_warmup_steps is 0: the warm-up needs at least 1"):
        SingleStrategy(0, 1.0, 1, 1).build_optimizer(Critic(), enable_critic_warmup=True)
