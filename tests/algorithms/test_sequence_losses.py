from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from packed_tokens import gradient_of, tokens_at
from torch.testing import assert_close

from lightrl.algorithms.losses import mean_loss, sequence_mean
from lightrl.algorithms.sequence_losses import gmpo, gspo, gspo_token, vespo


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gspo_clips_the_whole_sequence() -> None:
    # Ratios 4 and 1: geometric mean 2. A 1: -min(2, 1.5); A -1 in the second sequence, ratio 0.25: -max clipped at 0.5.
    tokens = tokens_at([4.0, 1.0, 0.25], [1.0, 1.0, -1.0], lengths=[2, 1])
    loss = gspo(tokens, clip_low=0.5, clip_high=0.5)
    assert_close(loss.terms, double(-1.5, -1.5, 0.5), atol=1e-6, rtol=0)
    assert loss.is_clipped.tolist() == [True, True, True]
    assert_close(gradient_of(gspo, tokens, clip_low=0.5, clip_high=0.5), double(0, 0, 0), atol=1e-6, rtol=0)


def test_gspo_gradient_is_shared_by_the_tokens() -> None:
    # s = 2, A = -1: term 2 at both tokens. Under sequence_mean each token gets -s A / length = 1.
    tokens = tokens_at([4.0, 1.0], [-1.0, -1.0])
    leaf = tokens.logprobs.clone().requires_grad_()
    assert_close(gspo(tokens).terms, double(2.0, 2.0), atol=1e-6, rtol=0)
    weights = sequence_mean(tokens.mask, tokens.sequence_index, 1)
    mean_loss(gspo(dataclasses.replace(tokens, logprobs=leaf)).terms, weights).backward()
    assert_close(leaf.grad, double(1.0, 1.0), atol=1e-6, rtol=0)


def test_gspo_counts_trained_tokens_only() -> None:
    # The masked token's ratio 16 is left out: s = 4, not (4 x 16)^(1/2) = 8.
    tokens = tokens_at([4.0, 16.0], [-1.0, -9.0], mask=[True, False])
    assert_close(gspo(tokens).terms, double(4.0, 0.0), atol=1e-6, rtol=0)


def test_gspo_takes_the_mean_of_the_advantages() -> None:
    # s = 2, mean advantage (-1 - 3) / 2 = -2
    assert_close(gspo(tokens_at([4.0, 1.0], [-1.0, -3.0])).terms, double(4.0, 4.0), atol=1e-6, rtol=0)


def test_gspo_of_one_token_is_ppo() -> None:
    # -1.1 x 2 and, clipped, -1.2 x 2
    tokens = tokens_at([1.1, 1.5], [2.0, 2.0], lengths=[1, 1])
    assert_close(gspo(tokens, clip_low=0.2, clip_high=0.2).terms, double(-2.2, -2.4), atol=1e-6, rtol=0)


def test_a_sequence_ratio_exactly_at_the_clip_keeps_its_gradient() -> None:
    # s = exp(0) = 1 exactly, and clip_high 0: the bound itself. -s A / length for each of two terms: -1.
    tokens = tokens_at([1.0, 1.0], [1.0, 1.0])
    assert gspo(tokens, clip_low=0.0, clip_high=0.0).is_clipped.tolist() == [False, False]
    assert_close(gradient_of(gspo, tokens, clip_low=0.0, clip_high=0.0), double(-1.0, -1.0), atol=1e-6, rtol=0)


def test_gspo_token_keeps_each_advantage() -> None:
    # s = 2 everywhere; terms -s A; the gradient stays with the token: -s A.
    tokens = tokens_at([4.0, 1.0], [-1.0, -2.0])
    assert_close(gspo_token(tokens).terms, double(2.0, 4.0), atol=1e-6, rtol=0)
    assert_close(gradient_of(gspo_token, tokens), double(2.0, 4.0), atol=1e-6, rtol=0)


def test_gspo_token_equals_gspo_for_one_advantage_per_sequence() -> None:
    tokens = tokens_at([1.2, 0.9, 1.1, 0.7], [-1.0, -1.0, -1.0, 2.0], lengths=[3, 1])
    weights = sequence_mean(tokens.mask, tokens.sequence_index, 2)
    for loss in (gspo, gspo_token):
        terms = loss(tokens, clip_low=0.2, clip_high=0.2).terms
        # (1.2 x 0.9 x 1.1)^(1/3) = 1.188^(1/3) = 1.0591045; 0.7 unclipped: (1.0591045 - 1.4) / 2
        assert_close(mean_loss(terms, weights), double(-0.1704477)[0], atol=1e-6, rtol=0)
    # gspo shares a sequence's gradient over its tokens: the sum over the sequence's terms gives each token -s A.
    slopes = [gradient_of(loss, tokens, clip_low=0.2, clip_high=0.2) for loss in (gspo, gspo_token)]
    assert_close(slopes[0], slopes[1], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("advantage", "term", "slopes"),
    [
        # log ratios 1.3862944 and 0. A 1: (0.4 + 0) / 2 = 0.2, exp 1.2214028, and the clipped token gets no gradient.
        (1.0, -1.2214028, [0.0, -1.2214028]),
        # A -1: not clipped from above, (1.3862944 + 0) / 2, exp 2; two terms times 2 / 2 each.
        (-1.0, 2.0, [2.0, 2.0]),
    ],
)
def test_gmpo_by_hand(advantage: float, term: float, slopes: list[float]) -> None:
    tokens = tokens_at([4.0, 1.0], [advantage, advantage])
    assert_close(gmpo(tokens).terms, double(term, term), atol=1e-6, rtol=0)
    assert gmpo(tokens).is_clipped.tolist() == [advantage > 0, False]
    assert_close(gradient_of(gmpo, tokens), double(*slopes), atol=1e-6, rtol=0)


def test_gmpo_takes_the_mean_of_the_advantages_and_clips_by_each() -> None:
    # Log ratios 1.3862944 and -1.3862944. A 3: held at 0.4; A -1: held at -0.4. exp(0) times the mean advantage 1.
    tokens = tokens_at([4.0, 0.25], [3.0, -1.0])
    assert_close(gmpo(tokens).terms, double(-1.0, -1.0), atol=1e-6, rtol=0)
    assert gmpo(tokens).is_clipped.tolist() == [True, True]


def test_gmpo_clips_a_bad_token_from_below() -> None:
    # log 0.25 = -1.3862944, A -1: max(-1.3862944, -0.4); exp(-0.4) = 0.6703200
    tokens = tokens_at([0.25], [-1.0])
    assert_close(gmpo(tokens).terms, double(0.6703200), atol=1e-6, rtol=0)
    assert gmpo(tokens).is_clipped.tolist() == [True]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gmpo_keeps_the_gradient_of_a_token_exactly_at_its_bound(advantage: float) -> None:
    # log 1 = 0, and both bounds are 0: -s A with s = 1
    tokens = tokens_at([1.0], [advantage])
    assert gmpo(tokens, clip_low=0.0, clip_high=0.0).is_clipped.tolist() == [False]
    assert_close(gradient_of(gmpo, tokens, clip_low=0.0, clip_high=0.0), double(-advantage), atol=1e-6, rtol=0)


def test_gmpo_clips_nothing_without_an_advantage() -> None:
    assert gmpo(tokens_at([0.25], [0.0])).is_clipped.tolist() == [False]


@pytest.mark.parametrize("loss", [gspo, gspo_token, gmpo])
def test_the_cap_is_of_the_mean_and_not_of_a_token(loss) -> None:  # type: ignore[no-untyped-def]
    # Log ratios 24 and 0, A -1: s = exp(12) = 162754.7914190. A token held at 20 would make it exp(10).
    # Two terms of s, whose mean each token moves by half: slope s.
    tokens = tokens_at([math.exp(24), 1.0], [-1.0, -1.0])
    assert_close(loss(tokens).terms, double(162754.791419, 162754.791419), atol=1e-6, rtol=0)
    assert_close(gradient_of(loss, tokens), double(162754.791419, 162754.791419), atol=1e-6, rtol=0)
    # Log ratios 50 and 10: their mean, 30, is held at 20 and has no gradient.
    tokens = tokens_at([math.exp(50), math.exp(10)], [-1.0, -1.0])
    assert_close(loss(tokens).terms.log(), double(20.0, 20.0), atol=1e-6, rtol=0)
    assert_close(gradient_of(loss, tokens), double(0.0, 0.0), atol=0, rtol=0)


def test_gmpo_refuses_negative_bounds() -> None:
    with pytest.raises(ValueError, match="clip_low is -0.1 and clip_high 0.4: both bound"):
        gmpo(tokens_at([1.0], [1.0]), clip_low=-0.1)


@pytest.mark.parametrize("loss", [gspo, gspo_token, gmpo])
def test_a_fully_masked_sequence_is_zero_over_garbage(loss) -> None:  # type: ignore[no-untyped-def]
    nan = float("nan")
    tokens = tokens_at([nan, nan, 2.0], [nan, 1.0, -1.0], lengths=[2, 1], mask=[False, False, True])
    assert_close(loss(tokens, clip_low=0.9, clip_high=0.9).terms, double(0.0, 0.0, 2.0), atol=1e-6, rtol=0)
    assert_close(gradient_of(loss, tokens, clip_low=0.9, clip_high=0.9), double(0.0, 0.0, 2.0), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("ratios", "advantages", "slopes"),
    [
        ([2.0, 0.5], [1.5, 1.5], [-1.5, -1.5]),  # w = 1: weight 1
        # w = 2. A 1: e^3 2^2 e^-6 = 4 e^-3 = 0.1991483; A -1: e^2 2^3 e^-4 = 8 e^-2 = 1.0826823
        ([4.0, 0.5], [1.0, 1.0], [-0.1991483, -0.1991483]),
        ([4.0, 0.5], [-1.0, -1.0], [1.0826823, 1.0826823]),
        # w = 1/2. A 1: e^3 / 4 e^-1.5 = e^1.5 / 4 = 1.1204223; the mean of -3 and 1 is negative: e^2 / 8 e^-1 = e / 8 =
        # 0.3397852
        ([0.5, 1.0], [1.0, 1.0], [-1.1204223, -1.1204223]),
        ([0.5, 1.0], [-3.0, 1.0], [1.0193557, -0.3397852]),
        ([4.0, 0.5], [1.0, -1.0], [-0.1991483, 0.1991483]),  # a mean of 0 counts as good
    ],
)
def test_vespo_weighs_by_the_product_of_the_ratios(
    ratios: list[float], advantages: list[float], slopes: list[float]
) -> None:
    tokens = tokens_at(ratios, advantages)
    assert_close(gradient_of(vespo, tokens), double(*slopes), atol=1e-6, rtol=0)
    assert not vespo(tokens).is_clipped.any()


def test_vespo_is_finite_far_off_policy_and_reads_no_untrained_token() -> None:
    # log w is held between log 1e-8 and 20: e^3 1e-16 e^0 and e^3 e^40 e^(-3 e^20), which is 0.
    tokens = tokens_at(
        [1e-9, 1e9, float("nan"), 1.0], [1.0, 1.0, 1.0, 1.0], lengths=[1, 1, 2], mask=[True, True, False, True]
    )
    assert_close(gradient_of(vespo, tokens), double(0.0, 0.0, 0.0, -1.0), atol=1e-6, rtol=0)
    nothing = gradient_of(vespo, tokens_at([4.0], [1.0]), k_pos=0.0, lambda_pos=1.0)
    assert_close(nothing, double(-0.0497871), atol=1e-6, rtol=0)  # e^1 4^0 e^-4 = e^-3
