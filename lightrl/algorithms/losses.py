"""Policy losses that look at one token at a time. With r = policy / old policy, A the advantage, sg = no gradient.

A policy loss is `fn(tokens: PolicyTokens, **parameters) -> TokenLoss`: a term per token, which an aggregation weighs
(aggregation.py) and a correction may weigh once more (corrections.py). Parameters are keyword-only and have defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_bool_mask, require_same_shape
from lightrl.algorithms.tokens import PolicyTokens, TokenLoss, masked_log_ratio, token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Sums over the trained tokens of one micro-batch. Only loss_sum carries a gradient."""

    loss_sum: Tensor  # [] float
    clip_count: Tensor  # [] int64, tokens whose gradient the clip removed
    ratio_sum: Tensor  # [] float
    ratio_max: Tensor  # [] float, 0 where no token is trained
    num_tokens: Tensor  # [] int64


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """ppo_clip in sums, for tensors of any shape. With nothing trained the sum is 0 and its backward still runs.

    Args:
        logprobs: any shape, shared by all four tensors, an entry per token. It alone gets a gradient.
        mask: bool, True = trained. What stands elsewhere is never read, be it NaN.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    require_bool_mask(mask)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    terms, is_clipped = clipped_terms(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    ratio = torch.where(mask, torch.exp(log_ratio.detach()), 0.0)
    return PolicyLoss(
        loss_sum=terms.sum(),
        clip_count=is_clipped.sum(),
        ratio_sum=ratio.sum(),
        ratio_max=ratio.max() if ratio.numel() else ratio.sum(),
        num_tokens=mask.sum(),
    )


def clipped_terms(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token, and where that left no gradient."""
    require_clip_range(clip_low, clip_high)
    ratio = torch.exp(log_ratio)
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    fixed = ratio.detach()
    is_clipped = ((fixed < 1 - clip_low) & (advantages < 0)) | ((fixed > 1 + clip_high) & (advantages > 0))
    if dual_clip is not None:
        if dual_clip <= 1 + clip_high:
            raise ValueError(
                f"dual_clip is {dual_clip} and clip_high {clip_high}: dual_clip bounds the ratio of tokens with a "
                "negative advantage from above, so it must be more than 1 + clip_high."
            )
        terms = torch.where(advantages < 0, torch.minimum(terms, -dual_clip * advantages), terms)
        is_clipped = is_clipped | ((fixed > dual_clip) & (advantages < 0))
    return terms, is_clipped


def require_clip_range(clip_low: float, clip_high: float) -> None:
    """Raises ValueError unless [1 - clip_low, 1 + clip_high] is a range of ratios around 1."""
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(
            f"clip_low is {clip_low} and clip_high {clip_high}: the ratio is kept in [1 - clip_low, 1 + clip_high], "
            "so clip_low must be in [0, 1] and clip_high at least 0."
        )


def policy_gradient(tokens: PolicyTokens) -> TokenLoss:
    """-A log policy (REINFORCE): no ratio, so it is right for the first update after sampling alone."""
    logprobs = torch.where(tokens.mask, tokens.logprobs, 0.0)
    terms = -tokens.masked_advantages * logprobs
    return token_loss(terms, tokens.log_ratio, torch.zeros_like(tokens.mask), tokens.mask)


def ppo_clip(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, eq. 7).

    Two different bounds are DAPO's clip-higher (arXiv:2503.14476). dual_clip c holds the term of a token with A < 0 at
    -c A where r > c (arXiv:1912.09729); 3 is usual.
    """
    log_ratio = tokens.log_ratio
    terms, is_clipped = clipped_terms(
        log_ratio, tokens.masked_advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return token_loss(terms, log_ratio, is_clipped, tokens.mask)


def cispo(tokens: PolicyTokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy (MiniMax-M1, arXiv:2506.13585).

    The weight is clipped and no token loses its gradient. clip_low 1 is no lower bound.
    """
    require_clip_range(clip_low, clip_high)
    log_ratio = tokens.log_ratio
    ratio = torch.exp(log_ratio.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = -weight * tokens.masked_advantages * torch.where(tokens.mask, tokens.logprobs, 0.0)
    return token_loss(terms, log_ratio, weight != ratio, tokens.mask)


def sapo(tokens: PolicyTokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (SAPO, arXiv:2511.20347): a soft gate for a clip.

    At r = 1 the gradient is that of -r A; away from it the gate closes smoothly, faster for a larger tau.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos is {tau_pos} and tau_neg {tau_neg}: both must be more than 0.")
    log_ratio, advantages = tokens.log_ratio, tokens.masked_advantages
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_pos), tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (torch.exp(log_ratio) - 1))
    return token_loss(-gate * advantages, log_ratio, torch.zeros_like(tokens.mask), tokens.mask)


def cpgd(
    tokens: PolicyTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drift_coef: float = 0.1,
    drift_clip: float = 1.0,
) -> TokenLoss:
    """-min(l A, clip(l) A) + drift_coef sg(min(r - 1, drift_clip)) log policy (CPGD, arXiv:2505.12504, eq. 2).

    l is log r; clip holds l in [log(1 - clip_low), log(1 + clip_high)]. The last term has the gradient of k3 for
    KL(old policy || policy), clipped from above, so that it always pulls a ratio that is too large back.
    """
    require_clip_range(clip_low, clip_high)
    log_ratio, advantages = tokens.log_ratio, tokens.masked_advantages
    lowest = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    highest = math.log1p(clip_high)
    improvement = torch.minimum(log_ratio * advantages, log_ratio.clamp(lowest, highest) * advantages)
    fixed = log_ratio.detach()
    pull = torch.expm1(fixed).clamp(max=drift_clip)
    drift = pull * torch.where(tokens.mask, tokens.logprobs, 0.0)
    is_clipped = ((fixed < lowest) & (advantages < 0)) | ((fixed > highest) & (advantages > 0))
    return token_loss(-improvement + drift_coef * drift, log_ratio, is_clipped, tokens.mask)
