"""Updates that are not made, under every strategy with one bad rank of two, and the reasons that are given."""

from __future__ import annotations

import importlib.util
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightrl.strategy.base import TrainBatchResult
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import run_spmd
from lightrl.testing.strategy_contract import single_process

PROGRAM = Path(__file__).parents[1] / "programs" / "skipped_program.py"
STAGES = ["zero0", "zero1", "zero2", "zero3"] if importlib.util.find_spec("deepspeed") else []


@pytest.mark.slow
def test_one_bad_rank_of_two_under_every_strategy() -> None:
    output = run_spmd(PROGRAM, "ddp", "fsdp", *STAGES, world_size=2, timeout_s=400)
    for name in ("ddp", "fsdp", *STAGES):
        assert output.count(f"{name} checked") == 2


class Line(nn.Module):
    """x times a weight, in a record of its own where the batch asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Any) -> Any:
        found = (batch["x"] if isinstance(batch, dict) else batch) * self.weight
        return Scores(found, found.detach().log()) if isinstance(batch, dict) else found


class Scores(NamedTuple):
    scores: Tensor
    entropy: Tensor


def made() -> tuple[SingleStrategy, Line]:
    strategy, model = single_process(), Line()
    strategy.register(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    assert not strategy.train_batch([torch.ones(2)], lambda out, batch: out.mean(), len).skipped
    return strategy, model


def test_the_tensor_that_came_in_is_named() -> None:
    strategy, model = made()
    before = float(model.weight.detach())
    found = strategy.train_batch([torch.tensor([1.0, math.inf])], lambda out, batch: out.mean(), len)
    assert found.skipped
    assert math.isnan(found.grad_norm)
    assert found.reason == "The loss is inf. rank 0: input is inf at index 1; output is inf at index 1."
    assert float(model.weight.detach()) == before


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int64])
def test_a_mapping_and_a_named_tuple_are_read_by_name_and_masked_tokens_are_not(kind: torch.dtype) -> None:
    strategy, _ = made()
    batch = {
        "x": torch.tensor([math.nan, 1.0, -1.0, math.nan, math.nan]),
        "loss_mask": torch.tensor([False, True, True, True, True]).to(kind),
        "sequence_index": torch.tensor([0, 0, 1, 1, 1]),
    }
    found = strategy.train_batch([batch], lambda out, batch: out.scores[1:].mean(), lambda batch: 4)
    # The entropy has a NaN of its own, at the token of -1, since log -1 is NaN: told, for it is not NaN throughout.
    assert found.reason == (
        "The loss is nan. rank 0: x is nan at response token 1 of sample 1; scores is nan at response token 1 of "
        "sample 1; entropy is nan at response token 0 of sample 1."
    )


def test_an_entropy_that_nobody_asked_for_is_not_blamed() -> None:
    strategy, _ = made()
    batch = {"x": torch.tensor([-1.0, -2.0])}
    found = strategy.train_batch([batch], lambda out, batch: out.scores.mean() * math.nan, lambda batch: 2)
    assert found.reason.endswith("What came in and what the model returned are finite, so look at the loss function.")


@pytest.mark.parametrize(("weight", "text"), [(0.0, "0"), (math.nan, "nan"), (math.inf, "inf")])
def test_weights_that_make_no_mean_train_nothing(weight: float, text: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy, model = made()
    before = float(model.weight.detach())

    def run() -> TrainBatchResult:
        return strategy.train_batch([torch.ones(2)], lambda out, batch: out.mean(), lambda batch: weight)

    with caplog.at_level(logging.WARNING):
        found = run()
    wanted = f"There is nothing to train: the weights of all micro-batches of all ranks add up to {text}."
    assert (found.skipped, found.reason, found.num_micro_batches) == (True, wanted, 0)
    assert (found.loss, found.grad_norm) == (0.0, 0.0)
    assert caplog.messages == [f"{wanted} No rank makes this update: weights, optimizer and schedule stay as they are."]
    assert float(model.weight.detach()) == before


def test_a_gradient_that_is_not_finite_is_told_apart() -> None:
    strategy, _ = made()
    found = strategy.train_batch([torch.zeros(1)], lambda out, batch: out.sum().sqrt(), len)  # the slope of sqrt at 0
    assert found.skipped
    assert found.reason.endswith("though the loss is 0.")
    assert "The norm of the gradient is " in found.reason
    assert not strategy.train_batch([torch.ones(2)], lambda out, batch: out.mean(), len).reason


def test_of_two_models_the_reason_is_that_of_the_trained_one() -> None:
    strategy, _ = made()
    other = Line()
    strategy.register(other, torch.optim.SGD(other.parameters(), lr=1.0))
    with torch.no_grad():
        other.weight.fill_(math.nan)
    found = strategy.train_batch([torch.ones(2)], lambda out, batch: out.mean(), len, model=other)
    assert found.reason == "The loss is nan. rank 0: output is nan at index 0."


def test_a_skipped_update_does_not_count_in_a_schedule() -> None:
    strategy, model = single_process(), Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    strategy.register(model, optimizer, scheduler)
    for values, weight in ((torch.ones(1), 0.0), (torch.tensor([math.inf]), 1.0)):  # nothing to train; not finite
        assert strategy.train_batch(
            [values], lambda out, batch: out.mean(), lambda batch, weight=weight: weight
        ).skipped
        strategy.step_lr_scheduler()
    strategy.backward(model(torch.tensor([math.inf])).sum(), model, optimizer)
    assert strategy.optimizer_step(optimizer, model, scheduler).skipped
    strategy.step_lr_scheduler()
    assert scheduler.get_last_lr() == [1.0]
