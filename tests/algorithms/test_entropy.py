from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from lightrl.algorithms.entropy import active_entropy_coef, entropy_bonus, next_entropy_coef


def test_the_bonus_lowers_the_loss_of_trained_tokens() -> None:
    entropy = torch.tensor([2.0, math.nan], requires_grad=True)
    terms = entropy_bonus(entropy, torch.tensor([True, False]), coef=0.1)
    terms.sum().backward()
    # -0.1 x 2
    assert_close(terms.detach(), torch.tensor([-0.2, 0.0]), atol=1e-6, rtol=0)
    assert_close(entropy.grad, torch.tensor([-0.1, 0.0]), atol=1e-6, rtol=0)


def test_gradient_agrees_with_finite_differences() -> None:
    entropy = torch.rand(5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, True, False])
    assert torch.autograd.gradcheck(lambda leaf: entropy_bonus(leaf, mask, coef=0.3).sum(), (entropy,))


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [(0.01, 0.1, 0.015), (0.01, 0.3, 0.005), (0.01, 0.2, 0.01), (0.001, 0.3, 0.0), (0.999, 0.1, 1.0)],
)
def test_entropy_coefficient_steps_towards_its_target(coef: float, entropy: float, expected: float) -> None:
    assert next_entropy_coef(coef, entropy=entropy, target=0.2) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("entropy", "expected"), [(0.1, 0.5), (0.2, 0.5), (0.21, 0.0)])
def test_entropy_coefficient_acts_up_to_its_target(entropy: float, expected: float) -> None:
    assert active_entropy_coef(0.5, entropy=entropy, target=0.2) == expected
