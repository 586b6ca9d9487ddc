from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from lightrl.algorithms.selection import (
    clip_cov_candidates,
    covariance_sums,
    covariances,
    select_clip_cov,
    select_top,
    token_uniforms,
    top_threshold,
)

LOGPROBS = torch.tensor([-1.0, -3.0, math.nan, -2.0])
ADVANTAGES = torch.tensor([2.0, -1.0, 5.0, 2.0])
MASK = torch.tensor([True, True, False, True])


def test_covariances_by_hand() -> None:
    # Means -2 and 1; products (1)(1), (-1)(-2), (0)(1)
    sums = covariance_sums(LOGPROBS, ADVANTAGES, MASK)
    assert sums.tolist() == [3, -6, 3]
    found = covariances(LOGPROBS, ADVANTAGES, MASK, sums)
    assert_close(found, torch.tensor([1.0, 2.0, 0.0, 0.0]), atol=1e-6, rtol=0)


def test_covariances_carry_no_gradient() -> None:
    logprobs, advantages = torch.zeros(4, requires_grad=True), torch.ones(4, requires_grad=True)
    sums = covariance_sums(logprobs, advantages, MASK)
    assert not sums.requires_grad
    assert not covariances(logprobs, advantages, MASK, sums).requires_grad


def test_nothing_trained_has_no_covariance() -> None:
    nothing = torch.zeros(4, dtype=torch.bool)
    found = covariances(LOGPROBS, ADVANTAGES, nothing, covariance_sums(LOGPROBS, ADVANTAGES, nothing))
    assert found.tolist() == [0, 0, 0, 0]


def test_covariances_of_two_ranks_are_those_of_one() -> None:
    whole = covariances(LOGPROBS, ADVANTAGES, MASK, covariance_sums(LOGPROBS, ADVANTAGES, MASK))
    parts = [(LOGPROBS[p], ADVANTAGES[p], MASK[p]) for p in (slice(0, 1), slice(1, 4))]
    sums = covariance_sums(*parts[0]) + covariance_sums(*parts[1])
    assert_close(torch.cat([covariances(*part, sums) for part in parts]), whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("fraction", "threshold"),
    [(0.5, 3.0), (0.25, 4.0), (1.0, 1.0), (0.01, 4.0), (0.74, 3.0)],  # int(0.74 x 4) = 2 values; never fewer than one
)
def test_threshold_of_the_largest(fraction: float, threshold: float) -> None:
    assert top_threshold(torch.tensor([2.0, 4.0, 1.0, 3.0]), fraction) == threshold


def test_no_values_select_nothing() -> None:
    assert top_threshold(torch.zeros(0), 0.5) == math.inf


def test_a_fraction_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match="fraction is 1.5: it must be more than 0 and at most 1"):
        top_threshold(torch.zeros(3), 1.5)


def test_ties_are_all_selected_and_masked_tokens_never() -> None:
    values = torch.tensor([1.0, 3.0, 3.0, 3.0])
    mask = torch.tensor([True, True, True, False])
    assert select_top(values, mask, 3.0).tolist() == [False, True, True, False]


def test_candidates_lie_within_the_bounds() -> None:
    covariance = torch.tensor([0.9, 1.0, 5.0, 5.1, 2.0])
    mask = torch.tensor([True, True, True, True, False])
    assert clip_cov_candidates(covariance, mask).tolist() == [False, True, True, False, False]


def test_clip_cov_selects_by_chance() -> None:
    # 0.02 of 100 tokens among 4 candidates: each with chance 0.5
    candidates = torch.tensor([True, True, True, True, False])
    uniforms = torch.tensor([0.1, 0.49, 0.5, 0.9, 0.1])
    found = select_clip_cov(candidates, uniforms, num_candidates=4, num_tokens=100, fraction=0.02)
    assert found.tolist() == [True, True, False, False, False]


def test_uniforms_are_splitmix64() -> None:
    # splitmix64 of the state 0, as published with the algorithm: 0xE220A8397B1DCDAF. Its upper 53 bits over 2^53.
    from lightrl.algorithms.selection import _mix

    mixed = int(_mix(torch.zeros(1, dtype=torch.int64))) % 2**64
    assert mixed == 0xE220A8397B1DCDAF


def test_uniforms_are_spread_and_belong_to_the_token() -> None:
    ids = torch.arange(100).repeat_interleave(50)
    places = torch.arange(50).repeat(100)
    uniforms = token_uniforms(ids, places, seed=3)
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    assert abs(uniforms.mean().item() - 0.5) < 0.02  # 0.29 / sqrt(5000) = 0.004 is one deviation
    assert abs((uniforms < 0.1).double().mean().item() - 0.1) < 0.02
    assert len(uniforms.unique()) == 5000
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(token_uniforms(ids[order], places[order], seed=3), uniforms[order])
    assert not torch.equal(token_uniforms(ids, places, seed=4), uniforms)
