"""A resumed run has the learning rates that the uninterrupted one has, under each of torch's schedules."""

import inspect
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.serialization import get_safe_globals, safe_globals

from lightrl.strategy.saving.state_reader import _is_of_torch, load_object
from lightrl.strategy.torch_native import SingleStrategy

NUM_BEFORE, NUM_AFTER = 4, 5
Make = Callable[[Any], Any]


def sequential(optimizer: Optimizer) -> lr_scheduler.SequentialLR:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)]
    return lr_scheduler.SequentialLR(optimizer, [*parts, lr_scheduler.StepLR(optimizer, 1, 0.5)], [2, 6])


def chained(optimizer: Optimizer) -> lr_scheduler.ChainedScheduler:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 3, 0.5)]
    )


SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.8),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 7], 0.5),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.3, 6),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 7),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 8, 2.0),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.4, 0.2], total_steps=12),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "SWALR": lambda optimizer: SWALR(optimizer, 0.01, 3),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


def momentum_sgd(model: nn.Linear) -> SGD:
    return SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.05}], momentum=0.8)


def one_group(model: nn.Linear) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def adam(model: nn.Linear) -> Adam:
    return Adam([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.05}], betas=(0.8, 0.9))


class Run:
    """A model in the middle of its training."""

    def __init__(self, schedule: Make, make_optimizer: Make) -> None:
        self.strategy = SingleStrategy(0, 0.0, 1, 1)
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = make_optimizer(self.model)
        self.scheduler = schedule(self.optimizer)
        self.strategy.register(self.model, self.optimizer, self.scheduler)

    def step(self) -> tuple[list[Any], Tensor]:
        """Returns all that a schedule could have moved for this update, and the weights after it."""
        moved = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        loss = self.model(torch.ones(1, 2)).square().mean()
        self.strategy.backward(loss, self.model, self.optimizer)
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.strategy.optimizer_step(self.optimizer, self.model, None)
            self.scheduler.step(1.0)  # no progress; the caller knows the metric
        else:
            self.strategy.optimizer_step(self.optimizer, self.model, self.scheduler)
        return moved, self.model.weight.detach().clone()


@pytest.mark.parametrize("make_optimizer", [momentum_sgd, adam])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_where_it_was(name: str, make_optimizer: Make, tmp_path: Path) -> None:
    run = Run(SCHEDULES[name], make_optimizer)
    for _ in range(NUM_BEFORE):
        run.step()
    run.strategy.save_ckpt(run.model, str(tmp_path))
    again = Run(SCHEDULES[name], make_optimizer)
    again.strategy.load_ckpt(again.model, str(tmp_path))
    for _ in range(NUM_AFTER):
        (wanted, weights), (found, again_weights) = run.step(), again.step()
        assert found == wanted
        assert torch.equal(again_weights, weights)


def test_no_schedule_of_torch_is_left_out() -> None:
    classes = {
        name
        for name, item in vars(lr_scheduler).items()
        if inspect.isclass(item) and issubclass(item, lr_scheduler.LRScheduler)
    }
    assert {*classes, "SWALR"} - {"LRScheduler", "_LRScheduler"} == set(SCHEDULES)


def test_a_rate_that_was_set_by_hand_stays_unless_this_runs_rates_are_wanted(tmp_path: Path) -> None:
    def start() -> tuple[SingleStrategy, nn.Linear, SGD]:
        strategy, model = SingleStrategy(0, 0.0, 1, 1), nn.Linear(2, 1)
        optimizer = momentum_sgd(model)
        strategy.register(model, optimizer)
        return strategy, model, optimizer

    strategy, model, optimizer = start()
    optimizer.param_groups[0]["lr"] = 0.01
    strategy.save_ckpt(model, str(tmp_path))
    for flag, rate in ((True, 0.01), (False, 0.1)):
        strategy, model, optimizer = start()
        strategy.load_ckpt(model, str(tmp_path), load_lr_scheduler_states=flag)
        assert [group["lr"] for group in optimizer.param_groups] == [rate, 0.05]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    run = Run(SCHEDULES["StepLR"], momentum_sgd)
    run.strategy.save_ckpt(run.model, str(tmp_path))
    strategy = SingleStrategy(0, 0.0, 1, 1)
    for groups, schedule, text in (
        (momentum_sgd, None, "holds a learning-rate schedule, but none is registered with this model"),
        (
            lambda model: SGD(model.parameters(), lr=0.1),
            SCHEDULES["StepLR"],
            "rates of 2 parameter groups, and .* has 1",
        ),
    ):
        model = nn.Linear(2, 1)
        optimizer = groups(model)
        strategy.register(model, optimizer, schedule(optimizer) if schedule else None)
        with pytest.raises(ValueError, match=text):
            strategy.load_ckpt(model, str(tmp_path))
        strategy.load_ckpt(model, str(tmp_path), load_lr_scheduler_states=False)
        assert optimizer.param_groups[0]["lr"] == 0.1


class Odd(lr_scheduler.ExponentialLR):
    """A schedule that holds what no checkpoint can."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.folder = Path("nowhere")
        super().__init__(optimizer, 0.9)


def test_a_schedule_that_could_not_be_loaded_again_is_refused_at_the_save(tmp_path: Path) -> None:
    run = Run(Odd, momentum_sgd)
    with pytest.raises(ValueError, match=r"Odd.folder is a PosixPath, which cannot be loaded safely"):
        run.strategy.save_ckpt(run.model, str(tmp_path))


def test_what_another_package_declared_safe_is_refused_too(tmp_path: Path) -> None:
    run = Run(Odd, momentum_sgd)
    with safe_globals([PosixPath]):  # as Megatron does when it is imported
        with pytest.raises(ValueError, match=r"Odd.folder is a PosixPath, which cannot be loaded safely"):
            run.strategy.save_ckpt(run.model, str(tmp_path / "saved"))
        torch.save(Path("nowhere"), tmp_path / "object.pt")
        assert torch.load(tmp_path / "object.pt", weights_only=True) == Path("nowhere")
        with pytest.raises(ValueError, match=r"object.pt is damaged"):
            load_object(tmp_path / "object.pt")
        assert PosixPath in get_safe_globals()  # it stays declared for whoever did so
    assert not _is_of_torch(type("Named", (), {"__module__": "torchpackage.of_others"}))
