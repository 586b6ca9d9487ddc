"""Two sequences with trained tokens, [1, (9), 3] and [5], and one without, [(7), (7)]; masked terms in brackets."""

from __future__ import annotations

import math

import pytest
import torch
from packed_tokens import sequence_index_of
from torch import Tensor
from torch.testing import assert_close

from lightrl.algorithms.losses import (
    TokenWeights,
    mean_loss,
    sequence_mean,
    sequence_mean_token_sum,
    sequence_mean_token_sum_norm,
    token_mean,
)

TERMS = torch.tensor([1.0, 9.0, 3.0, 5.0, 7.0, 7.0])
MASK = torch.tensor([True, False, True, True, False, False])
INDEX = sequence_index_of([3, 1, 2])


def check(weights: TokenWeights, *, loss: float, total: float, slopes: list[float]) -> None:
    terms = TERMS.clone().requires_grad_()
    found = mean_loss(terms, weights)
    found.backward()
    assert_close(found.detach(), torch.tensor(loss), atol=1e-6, rtol=0)
    assert_close(weights.total, torch.tensor(float(total)), atol=0, rtol=0)
    assert_close(terms.grad, torch.tensor(slopes), atol=1e-6, rtol=0)


def test_token_mean() -> None:
    # (1 + 3 + 5) / 3
    check(token_mean(MASK, INDEX, 3), loss=3.0, total=3, slopes=[1 / 3, 0, 1 / 3, 1 / 3, 0, 0])


def test_sequence_mean() -> None:
    # ((1 + 3) / 2 + 5) / 2; the sequence without a trained token is none
    check(sequence_mean(MASK, INDEX, 3), loss=3.5, total=2, slopes=[0.25, 0, 0.25, 0.5, 0, 0])


def test_sequence_mean_token_sum() -> None:
    # (4 + 5) / 2
    check(sequence_mean_token_sum(MASK, INDEX, 3), loss=4.5, total=2, slopes=[0.5, 0, 0.5, 0.5, 0, 0])


def test_sequence_mean_token_sum_norm() -> None:
    # (4 / 4 + 5 / 4) / 2
    weights = sequence_mean_token_sum_norm(MASK, INDEX, 3, length=4)
    check(weights, loss=1.125, total=2, slopes=[0.125, 0, 0.125, 0.125, 0, 0])


@pytest.mark.parametrize("aggregation", [token_mean, sequence_mean, sequence_mean_token_sum])
def test_nothing_trained_is_zero_with_a_zero_gradient_over_garbage(aggregation) -> None:  # type: ignore[no-untyped-def]
    terms = torch.tensor([math.nan, math.inf], requires_grad=True)
    weights = aggregation(torch.tensor([False, False]), torch.tensor([0, 0]), 1)
    loss = mean_loss(terms, weights)
    loss.backward()
    assert (loss.item(), weights.total.item()) == (0, 0)
    assert_close(terms.grad, torch.zeros(2), atol=0, rtol=0)


@pytest.mark.parametrize("aggregation", [token_mean, sequence_mean, sequence_mean_token_sum])
def test_no_token_at_all(aggregation) -> None:  # type: ignore[no-untyped-def]
    none: Tensor = torch.zeros(0)
    weights = aggregation(none.bool(), none.long(), 1)
    assert mean_loss(none.requires_grad_(), weights).item() == 0


def test_one_token_is_the_same_under_all() -> None:
    mask, index = torch.tensor([True]), torch.tensor([0])
    for aggregation in (token_mean, sequence_mean, sequence_mean_token_sum):
        assert mean_loss(torch.tensor([2.5]), aggregation(mask, index, 1)).item() == 2.5


def test_a_length_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="length is 0: it is a number of tokens"):
        sequence_mean_token_sum_norm(MASK, INDEX, 3, length=0)


def test_terms_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"terms \[2\], weights \[6\]"):
        mean_loss(TERMS[:2], token_mean(MASK, INDEX, 3))
