from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from lightrl.algorithms.moments import clip_values, mean_and_std, moment_sums, whiten


def test_sums_count_each_value_by_its_weight() -> None:
    # 2 x 1 + 1 x 4; 2 x 1 + 1 x 16; the weight 0 is not read
    sums = moment_sums(torch.tensor([1.0, 4.0, math.nan]), torch.tensor([2, 1, 0]))
    assert sums.tolist() == [3, 6, 18]


def test_whitening_by_hand() -> None:
    # Mean 2, variance (1 + 1 + 4 + 4) / 4 = 2.5, deviation 1.5811388; -1 / 1.5811388 and so on
    values = torch.tensor([1.0, 3.0, 0.0, 4.0])
    sums = moment_sums(values, torch.ones(4))
    assert mean_and_std(sums) == (2.0, pytest.approx(1.5811388, abs=1e-6))
    expected = torch.tensor([-0.6324555, 0.6324555, -1.2649111, 1.2649111])
    assert_close(whiten(values, sums), expected, atol=1e-6, rtol=0)
    # with the mean put back
    assert_close(whiten(values, sums, shift_mean=False), expected + 2, atol=1e-6, rtol=0)


def test_eps_is_added_to_the_deviation() -> None:
    # Mean 1, deviation 1: -1 / (1 + 1)
    values = torch.tensor([0.0, 2.0])
    assert whiten(values, moment_sums(values, torch.ones(2)), eps=1.0).tolist() == [-0.5, 0.5]


def test_sums_carry_no_gradient() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not moment_sums(leaf, torch.ones(2)).requires_grad
    assert not moment_sums(torch.ones(2), leaf).requires_grad


def test_ranks_add_their_sums() -> None:
    values, weights = torch.tensor([1.0, 3.0, 0.0, 4.0]), torch.tensor([1, 2, 1, 0])
    whole = whiten(values, moment_sums(values, weights))
    sums = moment_sums(values[:1], weights[:1]) + moment_sums(values[1:], weights[1:])
    assert_close(whiten(values[:1], sums), whole[:1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6 + 0.1])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_equal_values_become_exactly_zero(value: float, count: int) -> None:
    values = torch.full((count,), value)
    sums = moment_sums(values, torch.ones(count))
    assert (whiten(values, sums) == 0).all()
    assert torch.equal(whiten(values, sums, shift_mean=False), values)


def test_nothing_counted_is_zero() -> None:
    values = torch.tensor([1.0])
    assert whiten(values, moment_sums(values, torch.zeros(1))).tolist() == [0]


def test_clip_holds_both_sides() -> None:
    assert clip_values(torch.tensor([-9.0, 0.5, 9.0]), 2.0).tolist() == [-2.0, 0.5, 2.0]
    with pytest.raises(ValueError, match="limit is 0: values are held in"):
        clip_values(torch.zeros(1), 0)
