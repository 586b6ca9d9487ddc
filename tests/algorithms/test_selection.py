from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightrl.algorithms.selection import (
    UpdateTokens,
    clip_cov_candidates,
    covariance_sums,
    covariances,
    largest_covariance,
    select_clip_cov,
    select_top,
    token_uniforms,
    top_cut,
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
    ("fraction", "cut"),
    # int(0.74 x 4) = 2 values; never fewer than one. Draws are compared only where values are equal.
    [(0.5, (3.0, 0.9)), (0.25, (4.0, 0.1)), (1.0, (1.0, 0.4)), (0.01, (4.0, 0.1)), (0.74, (3.0, 0.9))],
)
def test_the_last_of_the_largest(fraction: float, cut: tuple[float, float]) -> None:
    ranked = torch.tensor([[2.0, 0.5], [4.0, 0.1], [1.0, 0.4], [3.0, 0.9]], dtype=torch.float64)
    assert top_cut(ranked, fraction) == cut


def test_no_values_select_nothing() -> None:
    cut = top_cut(torch.zeros(0, 2), 0.5)
    assert select_top(torch.ones(2), torch.zeros(2), torch.ones(2).bool(), cut).tolist() == [False, False]


def test_a_fraction_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match="fraction is 1.5: it must be more than 0 and at most 1"):
        top_cut(torch.zeros(3, 2), 1.5)


def test_ties_go_to_the_lowest_draws_and_masked_tokens_are_never_selected() -> None:
    # Three of five: 5.0, and of the four tokens of 3.0, one of them masked, the two of the draws 0.2 and 0.5.
    values = torch.tensor([3.0, 3.0, 3.0, 3.0, 1.0, 5.0])
    draws = torch.tensor([0.9, 0.2, 0.1, 0.5, 0.0, 0.9], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True, True])
    cut = top_cut(torch.stack([values.double(), draws], dim=1)[mask], 0.6)
    assert cut == (3.0, 0.5)
    assert select_top(values, draws, mask, cut).tolist() == [False, True, False, True, False, True]


@pytest.mark.parametrize("advantages", [torch.zeros(200), torch.ones(200)])
def test_equal_advantages_select_a_fraction_whatever_the_split(advantages: Tensor) -> None:
    # Every covariance is 0: 0.05 of 200 tokens are 10, the same ten on one rank and on two, in any order.
    ids, positions = torch.arange(20).repeat_interleave(10), torch.arange(10).repeat(20)

    def select(part: Tensor, seed: int, gathered: list[Tensor]) -> Tensor:
        """The choice of a rank that holds the tokens of `part`; the others' rows are those that were gathered first."""

        def gather(rows: Tensor) -> Tensor:
            gathered.append(rows)
            return gathered[0].flip(0)

        return largest_covariance(
            UpdateTokens(
                logprobs=-torch.arange(200.0)[part],
                entropy=torch.zeros(len(part)),
                advantages=advantages[part],
                mask=torch.ones(len(part), dtype=torch.bool),
                sequence_ids=ids[part],
                positions=positions[part],
                seed=seed,
                sum_over_ranks=lambda sums: covariance_sums(-torch.arange(200.0), advantages, torch.ones(200).bool()),
                gather_over_ranks=gather,
            ),
            fraction=0.05,
        )

    gathered: list[Tensor] = []
    whole = select(torch.arange(200), 0, gathered)
    assert whole.sum() == 10
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    for part in (order[:70], order[70:]):
        assert torch.equal(select(part, 0, gathered), whole[part])
    assert len(set(ids[whole].tolist())) > 3  # spread over the samples
    assert not torch.equal(select(torch.arange(200), 1, []), whole)


def test_a_value_that_is_no_number_is_the_smallest() -> None:
    tokens = UpdateTokens(
        logprobs=torch.zeros(3),
        entropy=torch.zeros(3),
        advantages=torch.zeros(3),
        mask=torch.ones(3, dtype=torch.bool),
        sequence_ids=torch.zeros(3, dtype=torch.int64),
        positions=torch.arange(3),
        seed=0,
        sum_over_ranks=lambda sums: sums,
        gather_over_ranks=lambda rows: rows,
    )
    assert tokens.top(torch.tensor([math.nan, -5.0, 1.0]), 2 / 3).tolist() == [False, True, True]


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
