"""Policy losses that leave out the gradient of some tokens, or add a penalty to some. The signature: losses.py.

What is chosen by rank within the whole batch (clip_cov, kl_cov) comes in as `tokens.selected`, made by selection.py
before the batch is split: chosen per micro-batch it would hang on the split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.algorithms.losses import clipped_terms
from lightrl.algorithms.tokens import PolicyTokens, TokenLoss, token_loss


def dppo_tv(
    tokens: PolicyTokens, *, limit_low: float = 0.15, limit_high: float = 0.15, ratio_cap: float = 20.0
) -> TokenLoss:
    """-sg(min(r, ratio_cap)) A log policy, but 0 where the probability moved too far the way A pushes it.

    Too far is policy - old > limit_high for A > 0 and old - policy > limit_low for A < 0: the total variation between
    the two outcomes "this token" and "another" (DPPO, arXiv:2602.04879). Take the sampler's logprobs as the old ones.
    """
    change = _probability(tokens.logprobs, tokens.mask) - _probability(tokens.old_logprobs, tokens.mask)
    return _outside_region(tokens, change > limit_high, change < -limit_low, ratio_cap)


def dppo_kl(
    tokens: PolicyTokens, *, limit_low: float = 0.05, limit_high: float = 0.05, ratio_cap: float = 20.0
) -> TokenLoss:
    """dppo_tv with KL(old || policy) between the outcomes "this token" and "another" in the place of the variation."""
    new, old = _probability(tokens.logprobs, tokens.mask), _probability(tokens.old_logprobs, tokens.mask)
    rest_new, rest_old = (1 - new).clamp(min=1e-8), (1 - old).clamp(min=1e-8)
    divergence = -old * tokens.log_ratio.detach() + rest_old * (rest_old / rest_new).log()
    return _outside_region(
        tokens, (divergence > limit_high) & (new > old), (divergence > limit_low) & (new < old), ratio_cap
    )


def clip_cov(tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """ppo_clip with nothing for the selected tokens (Clip-Cov, arXiv:2505.22617).

    Selected are a few tokens at random of those whose covariance between log probability and advantage is large:
    selection.select_clip_cov.
    """
    selected, log_ratio = _required(tokens, "clip_cov"), tokens.log_ratio
    terms, is_clipped = clipped_terms(log_ratio, tokens.masked_advantages, clip_low=clip_low, clip_high=clip_high)
    return token_loss(torch.where(selected, 0.0, terms), log_ratio, is_clipped | selected, tokens.mask)


def kl_cov(tokens: PolicyTokens, *, kl_coef: float = 1.0) -> TokenLoss:
    """-r A, plus kl_coef (r - 1 - log r) for the selected tokens (KL-Cov, arXiv:2505.22617).

    Selected are the tokens of largest covariance between log probability and advantage: selection.select_top. The
    penalty is k3 for KL(old policy || policy).
    """
    selected, log_ratio = _required(tokens, "kl_cov"), tokens.log_ratio
    penalty = torch.where(selected, torch.expm1(log_ratio) - log_ratio, 0.0)
    terms = -torch.exp(log_ratio) * tokens.masked_advantages + kl_coef * penalty
    return token_loss(terms, log_ratio, selected, tokens.mask)


def _outside_region(tokens: PolicyTokens, too_high: Tensor, too_low: Tensor, ratio_cap: float) -> TokenLoss:
    log_ratio, advantages = tokens.log_ratio, tokens.masked_advantages
    is_outside = (too_high & (advantages > 0)) | (too_low & (advantages < 0))
    weight = torch.exp(log_ratio.detach()).clamp(max=ratio_cap)
    terms = -weight * advantages * torch.where(tokens.mask, tokens.logprobs, 0.0)
    return token_loss(torch.where(is_outside, 0.0, terms), log_ratio, is_outside, tokens.mask)


def _probability(logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.exp(torch.where(mask, logprobs.detach(), 0.0))


def _required(tokens: PolicyTokens, loss: str) -> Tensor:
    if tokens.selected is None:
        raise ValueError(f"{loss} needs to know which tokens are selected: give PolicyTokens(selected=...), [N] bool.")
    return tokens.selected
