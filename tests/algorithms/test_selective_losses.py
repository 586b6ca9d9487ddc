from __future__ import annotations

import pytest
import torch
from packed_tokens import gradient_of, tokens_at
from torch.testing import assert_close

from lightrl.algorithms.losses import dppo_kl, dppo_tv
from lightrl.algorithms.selection import clip_cov, kl_cov


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope", "is_outside"),
    [
        # Old probability 1/2.
        (1.2, 1.0, 0.6129907, -1.2, False),  # 0.6 - 0.5 = 0.1: -1.2 log 0.6
        (1.5, 1.0, 0.0, 0.0, True),  # 0.75 - 0.5 = 0.25 > 0.15, and A pushes on
        (1.5, -1.0, -0.4315231, 1.5, False),  # the same place, but A pulls back: 1.5 log 0.75
        (0.5, -1.0, 0.0, 0.0, True),  # 0.25 - 0.5 < -0.15
        (0.5, 1.0, 0.6931472, -0.5, False),  # -0.5 log 0.25
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_dppo_tv_by_hand(ratio: float, advantage: float, term: float, slope: float, is_outside: bool) -> None:
    tokens = tokens_at([ratio], [advantage])
    loss = dppo_tv(tokens)
    assert_close(loss.terms, double(term), atol=1e-6, rtol=0)
    assert loss.is_clipped.tolist() == [is_outside]
    assert_close(gradient_of(dppo_tv, tokens), double(slope), atol=1e-6, rtol=0)


def test_dppo_looks_at_probabilities_not_at_their_ratio() -> None:
    # 0.001 to 0.03 is a ratio of 30, but 0.029 of probability: it stays, with its weight held at 20.
    assert_close(gradient_of(dppo_tv, tokens_at([30.0], [1.0], old=0.001)), double(-20.0), atol=1e-6, rtol=0)
    # 0.99 to 0.792 is a ratio of 0.8, but 0.198 of probability: it goes.
    assert_close(gradient_of(dppo_tv, tokens_at([0.8], [-1.0], old=0.99)), double(0.0), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        # 0.5 log(0.5 / 0.75) + 0.5 log(0.5 / 0.25) = 0.5 (-0.4054651 + 0.6931472) = 0.1438410 > 0.05
        (1.5, 1.0, 0.0),
        (1.5, -1.0, 1.5),  # A pulls back
        (0.5, -1.0, 0.0),  # the mirror image: the same divergence
        (0.5, 1.0, -0.5),
        # 0.5 (-0.1823216 + 0.2231436) = 0.0204110 < 0.05
        (1.2, 1.0, -1.2),
    ],
)
def test_dppo_kl_by_hand(ratio: float, advantage: float, slope: float) -> None:
    tokens = tokens_at([ratio], [advantage])
    assert_close(gradient_of(dppo_kl, tokens), double(slope), atol=1e-6, rtol=0)
    assert dppo_kl(tokens).is_clipped.tolist() == [slope == 0.0]


def test_dppo_kl_limit_is_between_the_divergences() -> None:
    # 0.1438410 is outside 0.1438 and inside 0.1439.
    tokens = tokens_at([1.5], [1.0])
    assert dppo_kl(tokens, limit_high=0.1438).is_clipped.tolist() == [True]
    assert dppo_kl(tokens, limit_high=0.1439).is_clipped.tolist() == [False]


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_dppo_of_a_certain_token_is_finite(loss) -> None:  # type: ignore[no-untyped-def]
    tokens = tokens_at([1.0, 1.0], [1.0, -1.0], old=1.0)
    assert loss(tokens).terms.isfinite().all()
    assert_close(gradient_of(loss, tokens), double(-1.0, 1.0), atol=1e-6, rtol=0)


def test_dppo_kl_of_a_token_that_was_certain() -> None:
    # From 1 to 0.5: log 2 is far outside, though the rest had no probability.
    assert dppo_kl(tokens_at([0.5], [-1.0], old=1.0)).is_clipped.tolist() == [True]


def test_clip_cov_leaves_selected_tokens_out() -> None:
    # -1.1 x 2, nothing, and PPO's clip at 1.2 x 2
    tokens = tokens_at([1.1, 1.1, 1.5], [2.0, 2.0, 2.0], selected=[False, True, False])
    assert_close(clip_cov(tokens).terms, double(-2.2, 0.0, -2.4), atol=1e-6, rtol=0)
    assert_close(gradient_of(clip_cov, tokens), double(-2.2, 0.0, 0.0), atol=1e-6, rtol=0)
    assert clip_cov(tokens).is_clipped.tolist() == [False, True, True]


def test_clip_cov_has_the_clip_of_ppo_underneath_until_its_bounds_are_wide() -> None:
    # The formula of the paper is -r A for tokens that are not selected: -1.5 x 2, and 0.5 x 2 for A -2.
    tokens = tokens_at([1.5, 0.5, 1.5], [2.0, -2.0, 2.0], selected=[False, False, True])
    assert_close(clip_cov(tokens).terms, double(-2.4, 1.6, 0.0), atol=1e-6, rtol=0)
    assert_close(clip_cov(tokens, clip_low=1.0, clip_high=1e9).terms, double(-3.0, 1.0, 0.0), atol=1e-6, rtol=0)


def test_kl_cov_pulls_selected_tokens_back() -> None:
    # -2 x 2; with the penalty 3 (2 - 1 - log 2) = 0.9205584 on top; slopes -r A and -4 + 3 (2 - 1)
    tokens = tokens_at([2.0, 2.0], [2.0, 2.0], selected=[False, True])
    assert_close(kl_cov(tokens, kl_coef=3.0).terms, double(-4.0, -3.0794416), atol=1e-6, rtol=0)
    assert_close(gradient_of(kl_cov, tokens, kl_coef=3.0), double(-4.0, -1.0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_without_a_selection_there_is_no_loss(loss) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=f"{loss.__name__} needs to know which tokens are selected"):
        loss(tokens_at([1.0], [1.0]))


@pytest.mark.parametrize("loss", [clip_cov, kl_cov, dppo_tv, dppo_kl])
def test_masked_garbage_is_never_read(loss) -> None:  # type: ignore[no-untyped-def]
    nan = float("nan")
    tokens = tokens_at([nan, nan], [nan, nan], mask=[False, False], selected=[True, False])
    assert_close(loss(tokens).terms, double(0.0, 0.0), atol=0, rtol=0)
    assert_close(gradient_of(loss, tokens), double(0.0, 0.0), atol=0, rtol=0)
