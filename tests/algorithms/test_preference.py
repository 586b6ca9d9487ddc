"""Losses over pairs against numbers worked out by hand, and their gradients against finite differences."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightrl.algorithms.preference import (
    PreferenceLoss,
    answer_log_ratios,
    bradley_terry_terms,
    pair_mean,
    preference_terms,
)

# Softplus s(x) = log(1 + e^x): s(-1) = 0.3132617, s(0.5) = 0.9740770, s(1) = 1.3132617, s(-0.5) = 0.4740770.


def close(found: Tensor, wanted: list[float]) -> None:
    assert_close(found, torch.tensor(wanted), atol=1e-6, rtol=0)


def test_log_ratios_of_answers_are_sums_or_means_over_trained_tokens() -> None:
    # [-1 - -1.5, -2 - -2.25] = [0.5, 0.25]; [-0.5 - -1, untrained, -1.5 - -2] = [0.5, _, 0.5].
    given = {
        "logprobs": torch.tensor([-1.0, -2.0, -0.5, float("nan"), -1.5]),
        "ref_logprobs": torch.tensor([-1.5, -2.25, -1.0, 7.0, -2.0]),
        "mask": torch.tensor([True, True, True, False, True]),
        "sequence_index": torch.tensor([0, 0, 1, 1, 1]),
    }
    close(answer_log_ratios(**given, num_sequences=2), [0.75, 1.0])
    close(answer_log_ratios(**given, num_sequences=2, length_normalized=True), [0.375, 0.5])


@pytest.mark.parametrize(
    ("kind", "beta", "smoothing", "wanted"),
    [
        ("sigmoid", 0.5, 0.0, [0.3132617, 0.9740770]),  # s(-0.5 * 2), s(0.5 * 1)
        # 0.9 s(-1) + 0.1 s(1) = 0.2819355 + 0.1313262; 0.9 s(0.5) + 0.1 s(-0.5) = 0.8766693 + 0.0474077
        ("sigmoid", 0.5, 0.1, [0.4132617, 0.9240770]),
        ("ipo", 0.25, 0.0, [0.0, 9.0]),  # (2 - 2)^2, (-1 - 2)^2
        ("hinge", 0.5, 0.0, [0.0, 1.5]),  # max(0, 1 - 1), max(0, 1 + 0.5)
        ("hinge", 0.25, 0.0, [0.5, 1.25]),
    ],
)
def test_preference_terms(kind: PreferenceLoss, beta: float, smoothing: float, wanted: list[float]) -> None:
    close(preference_terms(kind, torch.tensor([2.0, -1.0]), beta=beta, label_smoothing=smoothing), wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_the_loss(value: float) -> None:
    """log sigmoid of infinity is 0, and so is the hinge: as if the pair were learned."""
    one, mask, owner = torch.zeros(1), torch.ones(1).bool(), torch.zeros(1).long()
    margin = answer_log_ratios(one, torch.tensor([value]), mask, owner, 1)
    for kind in get_args(PreferenceLoss):
        assert preference_terms(kind, margin, beta=0.1).isnan().all()
    assert bradley_terry_terms(torch.tensor([value]), one).isnan().all()
    assert bradley_terry_terms(one, torch.tensor([value])).isnan().all()


def test_bradley_terry() -> None:
    chosen, rejected = torch.tensor([1.0, 0.5]), torch.tensor([0.0, 1.0])
    close(bradley_terry_terms(chosen, rejected), [0.3132617, 0.9740770])  # s(-1), s(0.5)
    # Margins 2 and 0: s(-(1 - 2)) = s(1), s(0.5).
    close(bradley_terry_terms(chosen, rejected, margins=torch.tensor([2.0, 0.0])), [1.3132617, 0.9740770])
    # 0.01 * 1^2 = 0.01 and 0.01 * 1.5^2 = 0.0225 more.
    close(bradley_terry_terms(chosen, rejected, centring_coef=0.01), [0.3232617, 0.9965770])


SMOOTH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda c, r: preference_terms("sigmoid", c - r, beta=0.3, label_smoothing=0.2),
    "ipo": lambda c, r: preference_terms("ipo", c - r, beta=0.3),
    "hinge": lambda c, r: preference_terms("hinge", c - r, beta=0.3),
    "bradley_terry": lambda c, r: bradley_terry_terms(c, r, margins=torch.ones(9).double(), centring_coef=0.1),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_is_that_of_the_value(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    chosen, rejected = (4 * torch.randn(9, generator=draw, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(SMOOTH[name], (chosen.requires_grad_(), rejected.requires_grad_()))
    if name == "hinge":
        terms = SMOOTH[name](chosen, rejected)
        assert (terms == 0).any()  # it lies on both sides of its corner
        assert (terms > 0).any()


def test_gradient_goes_to_the_policy_alone() -> None:
    logprobs, reference = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    mask, owners = torch.tensor([True, False]), torch.tensor([0, 0])
    answer_log_ratios(logprobs, reference, mask, owners, 1).sum().backward()
    assert reference.grad is None
    assert logprobs.grad is not None
    close(logprobs.grad, [1.0, 0.0])


def test_extreme_margins_stay_finite() -> None:
    margins = torch.tensor([1e4, -1e4], requires_grad=True)
    terms = preference_terms("sigmoid", margins, beta=1.0)
    close(terms.detach(), [0.0, 1e4])
    (gradient,) = torch.autograd.grad(terms.sum(), margins)
    close(gradient, [0.0, -1.0])


def test_no_pair_gives_a_loss_of_0_that_flows() -> None:
    scores = torch.zeros(3, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    loss = pair_mean(bradley_terry_terms(scores[nothing], scores[nothing]))
    loss.backward()
    assert loss == 0
    assert scores.grad is not None
    close(scores.grad, [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kind": "sigmoid", "beta": 0.0}, "beta is 0.0"),
        ({"kind": "sigmoid", "beta": 1.0, "label_smoothing": 0.5}, "in [0, 0.5)"),
        ({"kind": "ipo", "beta": 1.0, "label_smoothing": 0.1}, "belongs to the sigmoid loss, not to ipo"),
        ({"kind": "dpo", "beta": 1.0}, "Choose one of sigmoid, ipo, hinge"),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        preference_terms(margins=torch.zeros(1), **settings)  # type: ignore[arg-type]
