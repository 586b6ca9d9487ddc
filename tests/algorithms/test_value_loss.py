from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from lightrl.algorithms.value_loss import value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "term", "slope", "is_clipped"),
    [
        (1.0, 1.0, 2.0, 0.5, -1.0, False),  # (1 - 2)^2 / 2
        (1.1, 1.0, 2.0, 0.405, -0.9, False),  # within 0.2 of the old one
        (1.5, 1.0, 2.0, 0.32, 0.0, True),  # moved far the right way: held at 1.2, 0.8^2 / 2
        (0.5, 1.0, 2.0, 1.125, -1.5, False),  # moved far the wrong way: (0.5 - 2)^2 / 2 is the larger
        (2.5, 1.0, 2.0, 0.32, 0.0, True),  # beyond the target: 0.5^2 < 0.8^2
    ],
)
def test_one_token(value: float, old: float, target: float, term: float, slope: float, is_clipped: bool) -> None:
    leaf = torch.tensor([value], requires_grad=True)
    mask = torch.tensor([True])
    loss = value_loss(leaf, torch.tensor([old]), torch.tensor([target]), mask, clip=0.2)
    loss.terms.sum().backward()
    assert_close(loss.terms.detach(), torch.tensor([term]), atol=1e-6, rtol=0)
    assert_close(leaf.grad, torch.tensor([slope]), atol=1e-6, rtol=0)
    assert loss.is_clipped.tolist() == [is_clipped]


def test_only_the_values_get_a_gradient() -> None:
    leaves = [torch.full((2,), value, requires_grad=True) for value in (1.1, 1.0, 2.0)]
    value_loss(*leaves, torch.ones(2, dtype=torch.bool)).terms.sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False]


def test_values_within_the_clip_are_never_called_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    old, moved, returns = (torch.randn(1000, generator=generator) for _ in range(3))
    mask = torch.ones(1000, dtype=torch.bool)
    assert not value_loss(old + moved.clamp(-0.19, 0.19), old, returns, mask, clip=0.2).is_clipped.any()


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    # (1.5 - 2)^2 / 2
    one = torch.ones(1)
    loss = value_loss(1.5 * one, one, 2 * one, one.bool(), clip=None)
    assert_close(loss.terms, torch.tensor([0.125]), atol=1e-6, rtol=0)


def test_masked_garbage_is_never_read() -> None:
    leaf = torch.tensor([math.nan], requires_grad=True)
    loss = value_loss(leaf, leaf, leaf, torch.tensor([False]))
    loss.terms.sum().backward()
    assert (loss.terms.item(), loss.is_clipped.item()) == (0, False)
    assert_close(leaf.grad, torch.zeros(1), atol=0, rtol=0)


def test_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(30, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(30, generator=generator) < 0.8
    assert value_loss(values, old, returns, mask).is_clipped.any()
    assert torch.autograd.gradcheck(
        lambda leaf: value_loss(leaf, old, returns, mask).terms.sum(), (values.requires_grad_(),)
    )


def test_a_clip_of_zero_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="clip is 0: it must be more than 0, or None"):
        value_loss(one, one, one, one.bool(), clip=0)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_loss(value: float, place: int) -> None:
    given = [torch.zeros(2) for _ in range(3)]  # values, old values, returns
    given[place][1] = value
    assert value_loss(*given, torch.ones(2).bool()).terms.isfinite().tolist() == [True, False]
