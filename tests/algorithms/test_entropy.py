from __future__ import annotations

import math

import torch
from torch.testing import assert_close

from lightrl.algorithms.entropy import entropy_bonus


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
