"""Accumulation by calls, and the arithmetic of batch sizes."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightrl.comm import Comm, known_world
from lightrl.strategy.optim.accumulation import accumulation_of, accumulation_steps
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[2] / "programs" / "unequal_calls_program.py"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs DeepSpeed: pip install "lightrl[deepspeed]"'
)


def test_calls_are_counted_for_each_optimizer() -> None:
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))
    accumulation = accumulation_of(first)
    assert accumulation.is_boundary()  # gradients from elsewhere
    accumulation.count(4, torch.zeros(()))
    assert accumulation_of(first) is accumulation
    assert not accumulation.is_boundary()
    assert accumulation.may_update(Comm())
    assert accumulation.gradient_divisor() == 0.25  # one of four: an early update undoes the division by 4
    assert accumulation_of(second).is_boundary()
    accumulation.after_update(first, is_finite=False)
    assert (accumulation.is_boundary(), accumulation.gradient_divisor()) == (True, 1.0)
    for _ in range(5):  # a loop that has refused the boundary at the fourth
        accumulation.count(4, torch.zeros(()))
    assert accumulation.may_update(Comm())
    assert accumulation.gradient_divisor() == 1.0


class OneOfTwoRanks(Comm):
    """A rank beside one that has made other calls of backward()."""

    def __init__(self, other: dict[str, float]) -> None:
        super().__init__()
        self._other = other

    def all_reduce(self, data: Any, op: str = "mean", weight: Any = None) -> Any:
        assert op == "mean"
        return {name: (data[name] + self._other[name]) / 2 for name in sorted(data)}


def test_ranks_that_made_different_numbers_of_calls_divide_by_the_same_number() -> None:
    divisors = []
    for own, other in ((4, 1), (1, 4)):
        accumulation = accumulation_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
        for _ in range(own):
            accumulation.count(4, torch.zeros(()))
        assert accumulation.may_update(OneOfTwoRanks({"share": other / 4, "is_finite": 1.0}))
        divisors.append(accumulation.gradient_divisor())
    assert divisors == [0.625, 0.625]  # 5 micro-batches, where 2 ranks x 4 were expected
    assert not accumulation.may_update(OneOfTwoRanks({"share": 1.0, "is_finite": 0.0}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "zero_stages",
    [pytest.param((), id="ddp, fsdp"), pytest.param("0123", marks=[needs_deepspeed, pytest.mark.engine], id="ZeRO")],
)
def test_a_rank_may_make_fewer_calls_or_fill_up_with_a_weight_of_0(zero_stages: tuple[str, ...] | str) -> None:
    """Every strategy allows the second, and ddp, ZeRO 0 and ZeRO 1 the first: the update is that of one process."""
    assert run_spmd(PROGRAM, *zero_stages, world_size=2, timeout_s=120).count("all checked") == 2


def test_one_loss_that_is_not_finite_spoils_the_update_that_it_belongs_to() -> None:
    accumulation = accumulation_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    for value in (1.0, float("nan"), 2.0):
        accumulation.count(3, torch.tensor(value))
    assert not accumulation.may_update(Comm())
    accumulation.after_update(torch.optim.SGD([torch.zeros(1)], lr=1.0), is_finite=False)
    assert accumulation.may_update(Comm())


def test_no_update_is_decided_while_the_optimizer_is_in_host_memory() -> None:
    """Also where a loss that is not finite forbids it: the gradients stay for the loop that loads and goes on."""
    strategy, model = SingleStrategy(0, 1.0, 1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    strategy.register(model, optimizer)
    for value in (1.0, float("nan")):
        strategy.backward(value * model(torch.ones(1, 1)).sum(), model, optimizer)
        if value == 1.0:
            assert strategy.optimizer_step(optimizer, model, None).stepped
    assert strategy.offload_optimizer() > 0
    with pytest.raises(RuntimeError, match="optimizer's states are offloaded"):
        strategy.optimizer_step(optimizer, model, None)
    assert model.weight.grad is not None
    strategy.load_optimizer()
    assert strategy.optimizer_step(optimizer, model, None).skipped


def test_sizes_that_do_not_fit_name_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert known_world() == 8
    assert accumulation_steps(128, 4, world_size=8) == 4
    assert accumulation_steps(128, 4, world_size=4) == 8
    with pytest.raises(ValueError, match="Nearest valid train_batch_size: 120 or 144"):
        accumulation_steps(128, 3, world_size=8)
    with pytest.raises(ValueError, match="Nearest valid train_batch_size: 32"):
        accumulation_steps(8, 4, world_size=8)


@pytest.mark.parametrize(("sizes", "name"), [((0, 1), "train_batch_size"), ((8, 0), "micro_train_batch_size")])
def test_a_size_below_one_is_refused(sizes: tuple[int, int], name: str) -> None:
    accumulation_steps(1, 1, world_size=1)
    with pytest.raises(ValueError, match=f"^{name} is 0: it must be at least 1"):
        accumulation_steps(*sizes, world_size=2)


@pytest.mark.parametrize("flags", [{}, {"load_module_only": True}, {"load_optimizer_states": False}])
def test_a_load_in_the_middle_of_an_accumulation_starts_a_new_one(flags: dict[str, bool], tmp_path: Path) -> None:
    """Gradients of other weights must not enter the next update, nor their number its boundary."""
    strategy, model = SingleStrategy(0, 0.0, 1, 2), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy.register(model, optimizer)

    def backward(value: float) -> None:
        strategy.backward(model(torch.tensor([[value]])).sum(), model, optimizer)

    strategy.save_ckpt(model, str(tmp_path))
    backward(100.0)
    strategy.load_ckpt(model, str(tmp_path), **flags)
    done = []
    for _ in range(2):
        backward(1.0)
        done.append(strategy.optimizer_step(optimizer, model, None))
    assert [step.stepped for step in done] == [False, True]
    assert done[-1].grad_norm == pytest.approx(2**0.5, abs=1e-6)  # of (1, 1), the weight's and the bias's
