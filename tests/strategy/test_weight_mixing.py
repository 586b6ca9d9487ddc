"""What two ranks do is in tests/programs/weight_average_program.py."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightrl.config import StrategyOptions
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.strategy.weight_mixing import mix_into


def placed(strategy: SingleStrategy, value: float, mean: float, batches: int, *, head: bool = False) -> nn.Module:
    """A weight, and buffers that a saved model has: one of floats, one of integers."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    for name, number in (("0.weight", value), ("1.running_mean", mean), ("1.num_batches_tracked", batches)):
        tensor: Tensor = model.state_dict()[name]
        tensor.fill_(number)
    if head:
        model.append(nn.Linear(1, 1))
    return strategy.prepare_frozen(model)


def numbers(model: nn.Module) -> list[float]:
    return [float(model.state_dict()[name]) for name in ("0.weight", "1.running_mean", "1.num_batches_tracked")]


def started() -> SingleStrategy:
    strategy = SingleStrategy(0, 0.0, 1, 1, StrategyOptions(exact_batches=True))
    strategy.setup_distributed()
    return strategy


def test_by_hand() -> None:
    strategy = started()
    target, source = placed(strategy, 2.0, 1.0, 3), placed(strategy, 6.0, 5.0, 7, head=True)
    mix_into(target, source, 0.25, strategy)
    # 0.25 x 6 + 0.75 x 2 = 3, 0.25 x 5 + 0.75 x 1 = 2, and a count is copied
    assert numbers(target) == [3.0, 2.0, 7.0]
    assert numbers(source) == [6.0, 5.0, 7.0]
    mix_into(target, source, 0.75, strategy)
    # 0.75 x 6 + 0.25 x 3 = 5.25, 0.75 x 5 + 0.25 x 2 = 4.25
    assert numbers(target) == [5.25, 4.25, 7.0]


def test_a_copy_is_exact_in_the_type_of_the_target() -> None:
    strategy = started()
    target, source = placed(strategy, 1e8, 1e8, 3), placed(strategy, 0.1, 0.3, 7)
    target.to(torch.bfloat16)
    mix_into(target, source, 1.0, strategy)
    assert numbers(target) == [float(torch.tensor(value).bfloat16()) for value in (0.1, 0.3)] + [7.0]
    same = placed(strategy, math.inf, 1e8, 3)
    mix_into(same, source, 1.0, strategy)
    assert numbers(same) == numbers(source)


def test_weights_in_host_memory_are_refused() -> None:
    strategy = started()
    target, source = placed(strategy, 1.0, 1.0, 1), placed(strategy, 2.0, 2.0, 2)
    strategy.residency.add(source).offload_parameters()
    with pytest.raises(RuntimeError, match="weights are offloaded"):
        mix_into(target, source, 1.0, strategy)
