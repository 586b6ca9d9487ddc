import math

import torch
from torch.testing import assert_close

from lightrl.algorithms.mismatch import mismatch_statistics


def test_statistics_by_hand() -> None:
    # trainer - sampler at the two kept tokens: ln 0.5 - ln 0.25 = 0.6931472, ln 0.25 - ln 0.5 = -0.6931472.
    # k3 of KL(sampler || trainer) = exp(t - s) - 1 - (t - s): 2 - 1 - 0.6931472 and 0.5 - 1 + 0.6931472: sum 0.5.
    trainer = torch.tensor([0.5, 0.25, math.nan]).log()
    sampler = torch.tensor([0.25, 0.5, 0.5]).log()
    statistics = mismatch_statistics(trainer, sampler, torch.tensor([True, True, False]))
    assert_close(statistics["max_abs"], torch.tensor(0.6931472), atol=1e-6, rtol=0)
    assert_close(statistics["sum_abs"], torch.tensor(1.3862944), atol=1e-6, rtol=0)
    assert_close(statistics["sum_k3"], torch.tensor(0.5), atol=1e-6, rtol=0)
    assert int(statistics["count"]) == 2


def test_the_direction_is_from_the_sampler_to_the_trainer() -> None:
    # One token, t - s = ln 2: 2 - 1 - 0.6931472. The other direction would be 0.1931472.
    statistics = mismatch_statistics(torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), torch.tensor([True]))
    assert_close(statistics["sum_k3"], torch.tensor(0.3068528), atol=1e-6, rtol=0)


def test_nothing_kept_is_all_zero() -> None:
    statistics = mismatch_statistics(torch.tensor([math.nan]), torch.zeros(1), torch.tensor([False]))
    assert {name: value.item() for name, value in statistics.items()} == {
        "max_abs": 0,
        "sum_abs": 0,
        "sum_k3": 0,
        "count": 0,
    }


def test_the_statistics_carry_no_gradient() -> None:
    trainer = torch.zeros(2, requires_grad=True)
    statistics = mismatch_statistics(trainer, torch.ones(2), torch.tensor([True, True]))
    assert not any(value.requires_grad for value in statistics.values())
