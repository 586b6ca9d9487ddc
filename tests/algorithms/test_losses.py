from __future__ import annotations

import math

import pytest
import torch
from packed_tokens import gradient_of, tokens_at
from torch import Tensor
from torch.testing import assert_close

from lightrl.algorithms.losses import PolicyTokens, TokenLoss, cispo, cpgd, policy_gradient, ppo_clip, sapo


def clipped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """ppo_clip of one sequence, from its tensors."""
    tokens = PolicyTokens(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        sequence_index=torch.zeros(len(mask), dtype=torch.int64),
        num_sequences=1,
    )
    return ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high)


def loss_at_ratios(ratios: list[float], advantages: list[float], mask: list[bool] | None = None) -> TokenLoss:
    """The loss at clip_low 0.2 and clip_high 0.3, of old probabilities 1/2 and new ones ratio/2."""
    logprobs = torch.tensor([math.log(0.5 * ratio) for ratio in ratios])
    old_logprobs = torch.full((len(ratios),), math.log(0.5))
    kept = torch.tensor(mask if mask is not None else [True] * len(ratios))
    return clipped(logprobs, old_logprobs, torch.tensor(advantages), kept, clip_low=0.2, clip_high=0.3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clip_count"),
    [
        (1.0, 2.0, -2.0, 0),  # -(1 * 2)
        (1.1, 2.0, -2.2, 0),  # -(1.1 * 2)
        (1.5, 2.0, -2.6, 1),  # above, good: -min(3.0, 1.3 * 2)
        (0.5, 2.0, -1.0, 0),  # below, good: -min(1.0, 0.8 * 2)
        (1.1, -2.0, 2.2, 0),  # -(1.1 * -2)
        (1.5, -2.0, 3.0, 0),  # above, bad: -min(-3.0, -2.6)
        (0.5, -2.0, 1.6, 1),  # below, bad: -min(-1.0, -1.6)
        (1.5, 0.0, 0.0, 0),  # an advantage of 0 has no gradient for the clip to remove
    ],
)
def test_one_token(ratio: float, advantage: float, loss: float, clip_count: int) -> None:
    result = loss_at_ratios([ratio], [advantage])
    assert_close(result.terms.sum(), torch.tensor(loss), atol=1e-6, rtol=0)
    assert int(result.is_clipped.sum()) == clip_count
    assert result.ratio.shape == (1,)


def test_the_sum_and_its_statistics_count_trained_tokens_only() -> None:
    # Trained: -2.2 (ratio 1.1), +1.6 (0.5, clipped), -2.6 (1.5, clipped): -3.2; ratios 3.1. The masked one is clipped.
    result = loss_at_ratios([1.1, 0.5, 1.5, 9.0], [2.0, -2.0, 2.0, 2.0], [True, True, True, False])
    assert_close(result.terms.sum(), torch.tensor(-3.2), atol=1e-6, rtol=0)
    assert_close(result.ratio.sum(), torch.tensor(3.1), atol=1e-6, rtol=0)
    assert_close(result.ratio.max(), torch.tensor(1.5), atol=1e-6, rtol=0)
    assert int(result.is_clipped.sum()) == 2
    assert int((result.ratio > 0).sum()) == 3


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0)])
def test_a_ratio_exactly_at_the_clip_keeps_its_whole_gradient(ratio: float, advantage: float) -> None:
    # Powers of two, so that the ratio is exact: 1 - 0.5 and 1 + 0.5. There d(-r A)/dlogp = -r A.
    old_logprobs = torch.zeros(1, dtype=torch.float64)
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    assert logprobs.exp().item() == ratio
    advantages = torch.tensor([advantage], dtype=torch.float64)
    result = clipped(logprobs, old_logprobs, advantages, torch.tensor([True]), clip_low=0.5, clip_high=0.5)
    result.terms.sum().backward()
    assert int(result.is_clipped.sum()) == 0
    assert_close(logprobs.grad, torch.tensor([-ratio * advantage], dtype=torch.float64), atol=1e-6, rtol=0)


def test_gradient_by_hand() -> None:
    # d/dlogp of -r A is -r A where the clip does not bind, 0 where it does:
    # r 1, A 2: -2;  r 1.5, A 2 (clipped): 0;  r 1.5, A -2: 3;  r 0.5, A -2 (clipped): 0;  masked: 0.
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 1.0])
    logprobs = ratios.log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0])
    mask = torch.tensor([True, True, True, True, False])
    clipped(logprobs, torch.zeros(5), advantages, mask, clip_low=0.2, clip_high=0.3).terms.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-2.0, 0.0, 3.0, 0.0, 0.0]), atol=1e-6, rtol=0)


def test_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    old_logprobs = -torch.rand(40, generator=generator, dtype=torch.float64)
    shift = 0.8 * (torch.rand(40, generator=generator, dtype=torch.float64) - 0.5)
    logprobs = (old_logprobs + shift).requires_grad_()
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    mask = torch.rand(40, generator=generator) < 0.8

    def loss_sum(logprobs: Tensor) -> Tensor:
        return clipped(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28).terms.sum()

    assert clipped(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28).is_clipped.any()
    assert torch.autograd.gradcheck(loss_sum, (logprobs,))


def test_fully_masked_is_zero_with_a_zero_gradient_even_over_nan() -> None:
    logprobs = torch.tensor([math.nan, -math.inf, 500.0], requires_grad=True)
    garbage = torch.tensor([1.0, math.nan, -math.inf])
    mask = torch.zeros(3, dtype=torch.bool)
    result = clipped(logprobs, garbage, garbage, mask, clip_low=0.2, clip_high=0.2)
    result.terms.sum().backward()
    assert result.terms.sum().item() == 0
    assert_close(logprobs.grad, torch.zeros(3), atol=0, rtol=0)
    assert not result.is_clipped.any()
    assert result.ratio.tolist() == [0] * 3


def test_no_token_at_all_still_runs_backward() -> None:
    logprobs = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0)
    result = clipped(logprobs, none, none, none.bool(), clip_low=0.2, clip_high=0.2)
    result.terms.sum().backward()
    assert (result.terms.sum().item(), result.ratio.numel()) == (0, 0)
    assert logprobs.grad is not None


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    ratios, advantages = [1.1, 0.5, 1.5, 0.9], [2.0, -2.0, 2.0, -1.0]
    whole = loss_at_ratios(ratios, advantages).terms.sum()
    parts = (
        loss_at_ratios(ratios[:1], advantages[:1]).terms.sum() + loss_at_ratios(ratios[1:], advantages[1:]).terms.sum()
    )
    assert_close(whole, parts, atol=1e-6, rtol=0)


def test_old_logprobs_and_advantages_get_no_gradient() -> None:
    leaves = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([True, True])
    loss = clipped(*leaves, mask, clip_low=0.2, clip_high=0.2)
    loss.terms.sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False]
    assert not loss.ratio.requires_grad


def test_a_column_of_advantages_is_refused() -> None:
    row, column, mask = torch.zeros(2), torch.zeros(2, 1), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantages \[2, 1\]"):
        clipped(row, row, column, mask, clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize(("clip_low", "clip_high"), [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1)])
def test_bounds_that_cannot_be_are_refused(clip_low: float, clip_high: float) -> None:
    row, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"clip_low must be in \[0, 1\]"):
        clipped(row, row, row, mask, clip_low=clip_low, clip_high=clip_high)


def test_policy_gradient_by_hand() -> None:
    # Probability 1/2, A 2: -2 ln 0.5 = 1.3862944; its gradient is -A whatever the ratio.
    tokens = tokens_at([1.0], [2.0])
    loss = policy_gradient(tokens)
    assert_close(loss.terms, torch.tensor([1.3862944], dtype=torch.float64), atol=1e-6, rtol=0)
    assert_close(gradient_of(policy_gradient, tokens), torch.tensor([-2.0], dtype=torch.float64), atol=1e-6, rtol=0)


def test_ppo_clip_has_the_terms_of_the_sums() -> None:
    # As above: -2.2, 1.6 (clipped), -2.6 (clipped); the masked one is 0.
    tokens = tokens_at([1.1, 0.5, 1.5, 9.0], [2.0, -2.0, 2.0, 2.0], mask=[True, True, True, False])
    loss = ppo_clip(tokens, clip_low=0.2, clip_high=0.3)
    assert_close(loss.terms, torch.tensor([-2.2, 1.6, -2.6, 0.0], dtype=torch.float64), atol=1e-6, rtol=0)
    assert_close(loss.ratio, torch.tensor([1.1, 0.5, 1.5, 0.0], dtype=torch.float64), atol=1e-6, rtol=0)
    assert loss.is_clipped.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope", "is_clipped"),
    [
        (4.0, -2.0, 6.0, 0.0, True),  # PPO: 8; held at 3 x 2
        (2.5, -2.0, 5.0, 5.0, False),  # below 3: -(2.5 x -2)
        (4.0, 2.0, -2.6, 0.0, True),  # a good token: PPO's own clip, 1.3 x 2
        (0.5, -2.0, 1.6, 0.0, True),  # PPO's own clip, 0.8 x 2
    ],
)
def test_dual_clip_bounds_bad_tokens(
    ratio: float, advantage: float, term: float, slope: float, is_clipped: bool
) -> None:
    tokens = tokens_at([ratio], [advantage])
    loss = ppo_clip(tokens, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert_close(loss.terms, torch.tensor([term], dtype=torch.float64), atol=1e-6, rtol=0)
    assert loss.is_clipped.tolist() == [is_clipped]
    found = gradient_of(ppo_clip, tokens, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert_close(found, torch.tensor([slope], dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dual_clip", [1.1, 1.5])
def test_a_dual_clip_inside_the_clip_is_refused(dual_clip: float) -> None:
    with pytest.raises(ValueError, match=rf"dual_clip is {dual_clip} .* must be more than 1 \+ clip_high"):
        ppo_clip(tokens_at([1.0], [1.0]), clip_high=0.5, dual_clip=dual_clip)


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope", "is_clipped"),
    [
        # log(0.5 x 1.5) = -0.2876821, log(0.5 x 1.1) = -0.5978370, log(0.5 x 0.5) = -1.3862944; clip [0, 1.2]
        (1.5, 2.0, 0.6904370, -2.4, True),  # -1.2 x 2 x -0.2876821: the weight is clipped, the gradient stays
        (1.1, 2.0, 1.3152414, -2.2, False),  # -1.1 x 2 x -0.5978370
        (1.5, -1.0, -0.3452185, 1.2, True),  # a bad token is clipped alike
        (0.5, 1.0, 0.6931472, -0.5, False),  # no lower bound
    ],
)
def test_cispo_by_hand(ratio: float, advantage: float, term: float, slope: float, is_clipped: bool) -> None:
    tokens = tokens_at([ratio], [advantage])
    loss = cispo(tokens, clip_high=0.2)
    assert_close(loss.terms, torch.tensor([term], dtype=torch.float64), atol=1e-6, rtol=0)
    assert loss.is_clipped.tolist() == [is_clipped]
    found = gradient_of(cispo, tokens, clip_high=0.2)
    assert_close(found, torch.tensor([slope], dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        # tau 1 for A > 0, 2 for A < 0. The slope of the gate by log r is 4 s (1 - s) r, with s the sigmoid.
        (1.0, 1.0, -2.0, -1.0),  # 4 x 0.5; 4 x 0.25 x 1: that of -r A
        (1.0, -1.0, 1.0, 1.0),  # 2 x 0.5
        (1.5, 1.0, -2.4898373, -1.4100223),  # s(0.5) = 0.6224593: x 4; 4 x 0.6224593 x 0.3775407 x 1.5
        (1.5, 2.0, -4.9796746, -2.8200446),  # twice that
        (1.5, -1.0, 1.4621172, 1.1796716),  # s(1) = 0.7310586: x 2; 4 x 0.7310586 x 0.2689414 x 1.5
    ],
)
def test_sapo_by_hand(ratio: float, advantage: float, term: float, slope: float) -> None:
    tokens = tokens_at([ratio], [advantage])
    loss = sapo(tokens, tau_pos=1.0, tau_neg=2.0)
    assert_close(loss.terms, torch.tensor([term], dtype=torch.float64), atol=1e-6, rtol=0)
    found = gradient_of(sapo, tokens, tau_pos=1.0, tau_neg=2.0)
    assert_close(found, torch.tensor([slope], dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("tau_pos", "tau_neg"), [(0.0, 1.0), (1.0, 0.0)])
def test_sapo_refuses_a_temperature_of_zero(tau_pos: float, tau_neg: float) -> None:
    with pytest.raises(ValueError, match=f"tau_pos is {tau_pos} and tau_neg {tau_neg}: both must be more than 0"):
        sapo(tokens_at([1.0], [1.0]), tau_pos=tau_pos, tau_neg=tau_neg)


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope", "is_clipped"),
    [
        # l = log r in [log 0.8, log 1.2] = [-0.2231436, 0.1823216]; drift 0.1 min(r - 1, 1) log(0.5 r)
        (1.1, 1.0, -0.1012886, -0.99, False),  # -0.0953102 + 0.1 x 0.1 x -0.5978370; -1 + 0.01
        (1.5, 1.0, -0.1967057, 0.05, True),  # -0.1823216 + 0.1 x 0.5 x -0.2876821; 0 + 0.05
        (0.5, -1.0, -0.1538288, -0.05, True),  # -0.2231436 + 0.1 x -0.5 x -1.3862944; 0 - 0.05
        (1.5, -1.0, 0.3910810, 1.05, False),  # 0.4054651 - 0.0143841; 1 + 0.05
        (3.0, 0.0, 0.0405465, 0.1, False),  # the pull is held at 1: 0.1 x 1 x log 1.5
    ],
)
def test_cpgd_by_hand(ratio: float, advantage: float, term: float, slope: float, is_clipped: bool) -> None:
    tokens = tokens_at([ratio], [advantage])
    loss = cpgd(tokens, drift_coef=0.1, drift_clip=1.0)
    assert_close(loss.terms, torch.tensor([term], dtype=torch.float64), atol=1e-6, rtol=0)
    assert loss.is_clipped.tolist() == [is_clipped]
    found = gradient_of(cpgd, tokens, drift_coef=0.1, drift_clip=1.0)
    assert_close(found, torch.tensor([slope], dtype=torch.float64), atol=1e-6, rtol=0)


def test_cpgd_without_a_lower_clip() -> None:
    # log(1 - 1) is no bound: 0.6931472, the whole of -l A.
    loss = cpgd(tokens_at([0.5], [-1.0]), clip_low=1.0, drift_coef=0.0)
    assert_close(loss.terms, torch.tensor([-0.6931472], dtype=torch.float64), atol=1e-6, rtol=0)
