"""Sums have the same bits in any order, and the value of the true sum."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from lightrl.exact.sums import GradientSum, from_units, sum_of_squares, to_units


def gradients(count: int = 24, size: int = 40_000) -> list[Tensor]:
    """Gradients of tiles, spread over twelve decades; more elements than a chunk."""
    draw = torch.Generator().manual_seed(0)
    spread = 10 ** (12 * torch.rand(size, generator=draw) - 10)
    return [torch.randn(size, generator=draw) * spread for _ in range(count)]


def total_of(parts: list[Tensor]) -> GradientSum:
    total = GradientSum(parts[0].numel())
    for part in parts:
        total.add(part)
    return total


def test_gradients_add_up_to_the_same_bits_in_any_order_and_over_any_ranks() -> None:
    parts = gradients()
    forward = total_of(parts)
    ranks = [total_of(parts[rank::5]) for rank in range(5)]
    for half in ("high", "low"):
        reduced = sum((getattr(rank, half) for rank in ranks[::-1]), torch.zeros(parts[0].numel(), dtype=torch.float64))
        assert torch.equal(reduced, getattr(forward, half))
    total = forward.total()
    assert torch.equal(total, total_of(parts[::-1]).total())
    plain = [sum(part[1:], part[0]) for part in (parts, parts[::-1])]
    assert not torch.equal(*plain)  # a plain sum shows the order
    true = torch.tensor([math.fsum(column) for column in torch.stack(parts).double().T[:2000].tolist()])
    torch.testing.assert_close(total[:2000], true.float(), atol=24 * 2.0**-58, rtol=1e-7)


def test_a_sum_begins_anew_after_its_total() -> None:
    total = GradientSum(3)
    total.add(torch.tensor([1.0, 2.0, math.nan]))
    total.total()
    total.add(torch.tensor([0.5, 0.0, 0.25]))
    total.add(torch.tensor([0.5, 0.0, 0.0]))
    assert total.total().tolist() == [1.0, 0.0, 0.25]
    total.add_nothing()
    assert total.total().tolist() == [0.0, 0.0, 0.0]


def test_a_gradient_too_large_or_not_finite_makes_the_sum_nan() -> None:
    for bad in (2.0**15, -(2.0**15), math.inf, math.nan):
        total = GradientSum(3)
        total.add(torch.tensor([1.0, bad, 1.0]))
        assert total.total().isnan().any()
    largest = GradientSum(1)
    largest.add(torch.tensor([2.0**15 - 1]))
    assert largest.total().tolist() == [2.0**15 - 1]


def test_the_sum_of_squares_does_not_depend_on_the_cuts_and_keeps_small_ones() -> None:
    values = gradients(count=1, size=100_000)[0]
    largest = float(values.abs().max())
    whole = sum_of_squares([values], largest, 100_000)
    parts = [sum_of_squares([part], largest, 100_000) for part in values.split(33_333)]
    assert sum(part[0] for part in parts) == whole[0]
    assert sum(part[1] for part in parts) == whole[1]
    # 1 and 99,999 numbers of 1e-6: 1 + 99,999e-12
    small = torch.full((100_000,), 1e-6)
    small[0] = 1.0
    high, low = sum_of_squares([small], 1.0, 100_000)
    assert abs(high + low - (1 + 99_999e-12)) < 1e-13
    assert sum_of_squares([torch.zeros(4)], 0.0, 4) == (0.0, 0.0)


def test_units_are_exact_for_every_float() -> None:
    draw = random.Random(0)
    values = [draw.uniform(-1, 1) * 10 ** draw.uniform(-300, 300) for _ in range(200)] + [5e-324, -1.5e308, 0.0, 1.0]
    assert all(from_units(to_units(value)) == value for value in values)
    assert from_units(sum(map(to_units, values))) == math.fsum(values)
    assert from_units(to_units(1.0), to_units(3.0)) == 1 / 3
