"""The gradient of every policy loss against finite differences.

Where a loss holds a factor fixed (sg), its value says nothing of its gradient: then the differences are of the loss
with that factor written out as a constant of the place where the gradient is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from packed_tokens import sequence_index_of
from torch import Tensor

from lightrl.algorithms import losses, selection, sequence_losses
from lightrl.algorithms.losses import PolicyTokens, TokenLoss, sequence_sums

Loss = Callable[[PolicyTokens], TokenLoss]
N = 24


def tokens() -> PolicyTokens:
    generator = torch.Generator().manual_seed(0)
    old = -0.2 - torch.rand(N, generator=generator, dtype=torch.float64)
    return PolicyTokens(
        logprobs=old + 0.8 * (torch.rand(N, generator=generator, dtype=torch.float64) - 0.6),
        old_logprobs=old,
        advantages=torch.randn(N, generator=generator, dtype=torch.float64),
        mask=torch.rand(N, generator=generator) < 0.85,
        sequence_index=sequence_index_of([9, 1, 6, 8]),
        num_sequences=4,
        selected=torch.rand(N, generator=generator) < 0.3,
    )


SMOOTH: dict[str, Loss] = {
    "policy_gradient": losses.policy_gradient,
    "ppo_clip": lambda t: losses.ppo_clip(t, clip_low=0.2, clip_high=0.1),
    "ppo_clip, dual": lambda t: losses.ppo_clip(t, clip_low=0.2, clip_high=0.05, dual_clip=1.1),
    "sapo": lambda t: losses.sapo(t, tau_pos=1.0, tau_neg=2.0),
    "cpgd without drift": lambda t: losses.cpgd(t, clip_low=0.2, clip_high=0.1, drift_coef=0.0),
    "gspo": lambda t: sequence_losses.gspo(t, clip_low=0.1, clip_high=0.2),
    "gmpo": lambda t: sequence_losses.gmpo(t, clip_low=0.2, clip_high=0.1),
    "clip_cov": selection.clip_cov,
    "kl_cov": selection.kl_cov,
}


def written_out(at: PolicyTokens, name: str) -> Callable[[Tensor], Tensor]:
    """The loss by the log probabilities x alone, everything that it holds fixed taken at `at`."""
    ratio, advantages = at.log_ratio.exp(), at.masked_advantages
    change = at.logprobs.exp() - at.old_logprobs.exp()
    inside = torch.where(advantages > 0, change <= 0.05, change >= -0.05) & at.mask
    geometric = at.per_sequence(at.log_ratio).exp()
    drift = 0.3 * (ratio - 1).clamp(max=0.2) * at.mask
    good, w = (
        at.per_sequence(advantages) >= 0,
        sequence_sums(at.log_ratio, at.sequence_index, 4)[at.sequence_index].exp(),
    )
    smooth = torch.where(good, math.e**3 * w**2 * (-3 * w).exp(), math.e**2 * w**3 * (-2 * w).exp())
    factors = {
        "vespo": -smooth * advantages,
        "cispo": -ratio.clamp(0.8, 1.1) * advantages,
        "dppo_tv": -ratio * advantages * inside,
        "drift of cpgd": drift,
    }
    if name == "gspo_token":
        return lambda x: (-geometric * torch.exp(x - at.logprobs) * advantages).sum()
    return lambda x: (factors[name] * x).sum()


HELD: dict[str, Loss] = {
    "vespo": sequence_losses.vespo,
    "cispo": lambda t: losses.cispo(t, clip_low=0.2, clip_high=0.1),
    "dppo_tv": lambda t: losses.dppo_tv(t, limit_low=0.05, limit_high=0.05),
    "gspo_token": lambda t: sequence_losses.gspo_token(t, clip_low=0.9, clip_high=0.9),
    "drift of cpgd": lambda t: losses.cpgd(
        dataclasses.replace(t, advantages=torch.zeros(N, dtype=torch.float64)), drift_coef=0.3, drift_clip=0.2
    ),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_is_that_of_the_value(name: str) -> None:
    given = tokens()
    weights = torch.linspace(0.5, 1.5, N, dtype=torch.float64)

    def value(logprobs: Tensor) -> Tensor:
        return (SMOOTH[name](dataclasses.replace(given, logprobs=logprobs)).terms * weights).sum()

    assert torch.autograd.gradcheck(value, (given.logprobs.clone().requires_grad_(),))


@pytest.mark.parametrize("name", HELD)
def test_gradient_is_that_of_the_value_with_its_fixed_factors(name: str) -> None:
    given, step = tokens(), 1e-6
    leaf = given.logprobs.clone().requires_grad_()
    HELD[name](dataclasses.replace(given, logprobs=leaf)).terms.sum().backward()
    value = written_out(given, name)
    moves = step * torch.eye(N, dtype=torch.float64)
    numeric = torch.stack([(value(given.logprobs + m) - value(given.logprobs - m)) / (2 * step) for m in moves])
    torch.testing.assert_close(leaf.grad, torch.where(given.mask, numeric, 0.0), atol=1e-6, rtol=0)
    assert (numeric != 0).any()


UNCLIPPED = {"policy_gradient", "vespo", "sapo", "gspo_token", "drift of cpgd"}


@pytest.mark.parametrize("name", [name for name in (*SMOOTH, *HELD) if name not in UNCLIPPED])
def test_the_tokens_lie_on_both_sides_of_the_clip(name: str) -> None:
    """A gradient check that never meets the clip would pass without it."""
    is_clipped = {**SMOOTH, **HELD}[name](tokens()).is_clipped
    assert is_clipped.any()
    assert (~is_clipped & tokens().mask).any()
