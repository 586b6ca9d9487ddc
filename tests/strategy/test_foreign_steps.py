"""A strategy of the page's five methods alone trains with the numbers of plain PyTorch, on one rank and on two."""

from pathlib import Path

import pytest
import torch
from page_strategy import AveragingPageStrategy, PageStrategy
from torch.testing import assert_close

from lightrl.strategy.results import OptimizerStep
from lightrl.testing.strategy_contract import StrategyParity

PROGRAMS = Path(__file__).parents[1] / "programs"


class TestPageStrategy(StrategyParity):
    strategy = "page_strategy:PageStrategy"
    cwd = PROGRAMS
    reduces_once = False


class TestAveragingPageStrategy(StrategyParity):
    strategy = "page_strategy:AveragingPageStrategy"
    cwd = PROGRAMS
    reduces_once = False
    world_sizes = (2,)


@pytest.mark.parametrize("kind", [PageStrategy, AveragingPageStrategy])
def test_a_loop_of_the_page_steps_and_hears_what_was_done(kind: type[PageStrategy]) -> None:
    strategy = kind(0, 0.5, 1, 1)
    strategy.setup_distributed()
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model, optimizer, scheduler = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1.0), None))
    strategy.backward(model(torch.tensor([[3.0, 4.0]])).sum(), model, optimizer)
    step = strategy.optimizer_step(optimizer, model, scheduler)
    assert step == OptimizerStep(grad_norm=5.0, lr_list=[1.0])
    # The gradient (3, 4) is clipped from 5 to 0.5: the step is (0.3, 0.4).
    assert_close(model.weight.detach(), torch.tensor([[0.7, 0.6]]), atol=1e-6, rtol=0)
    strategy.backward(model(torch.tensor([[float("nan"), 4.0]])).sum(), model, optimizer)
    assert strategy.optimizer_step(optimizer, model, scheduler).skipped
    assert_close(model.weight.detach(), torch.tensor([[0.7, 0.6]]), atol=1e-6, rtol=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    strategy.register(model, optimizer, schedule)
    strategy.backward(model(torch.ones(1, 2)).sum(), model, optimizer)
    strategy.optimizer_step(optimizer, model, schedule)
    strategy.step_lr_scheduler(model)  # which the step above has done
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert dict(strategy.full_parameters(model))["weight"].dtype == torch.float32
    assert dict(strategy.full_parameters(model, torch.bfloat16))["weight"].dtype == torch.bfloat16


def test_a_skipped_update_does_not_count_in_the_schedule() -> None:
    strategy, model = PageStrategy(0, 0.0, 1, 1), torch.nn.Linear(1, 1, bias=False)
    strategy.setup_distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    strategy.prepare((model, optimizer, schedule))
    strategy.backward(model(torch.ones(1, 1)).sum(), model, optimizer)
    assert not strategy.optimizer_step(optimizer, model, None).skipped
    strategy.step_lr_scheduler(model)
    assert optimizer.param_groups[0]["lr"] == 0.5
    strategy.backward(model(torch.full((1, 1), float("nan"))).sum(), model, optimizer)
    assert strategy.optimizer_step(optimizer, model, None).skipped
    strategy.step_lr_scheduler(model)
    assert optimizer.param_groups[0]["lr"] == 0.5
    strategy.step_lr_scheduler(model)
    assert optimizer.param_groups[0]["lr"] == 0.25
