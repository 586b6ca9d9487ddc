"""Policy losses whose ratio is that of a whole sequence: s, the geometric mean of its tokens' ratios r.

Each token carries its sequence's term, so that sequence_mean gives the papers' mean over sequences; a sequence never
spans two micro-batches. The means are over trained tokens. MAX_LOG_RATIO bounds log s, not the log r of its tokens.
"""

from __future__ import annotations

import math

import torch

from lightrl.algorithms.losses import (
    MAX_LOG_RATIO,
    PolicyTokens,
    TokenLoss,
    clipped_terms,
    sequence_sums,
    token_loss,
)
from lightrl.algorithms.ranges import NotNegative, Positive

_MIN_LOG_WEIGHT = math.log(1e-8)  # of vespo's sequences


def gspo(tokens: PolicyTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """Computes -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), A the sequence's mean (arXiv:2507.18071, eq. 5).

    The paper has one A per sequence. Under sequence_mean the gradient with respect to a token's log probability is
    -s A / length.
    """
    terms, is_clipped = clipped_terms(
        tokens.per_sequence(tokens.full_log_ratio).clamp(max=MAX_LOG_RATIO),
        tokens.per_sequence(tokens.masked_advantages),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return token_loss(terms, tokens.log_ratio, is_clipped, tokens.mask)


def gspo_token(tokens: PolicyTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """Computes gspo with sg(s) policy / sg(policy) in place of s, each token with its own A (arXiv:2507.18071, eq. 13).

    Where a sequence's advantages are equal, value and gradient are those of gspo under sequence_mean.
    """
    log_ratio = tokens.full_log_ratio
    sequence_log_ratio = tokens.per_sequence(log_ratio.detach()) + log_ratio - log_ratio.detach()
    terms, is_clipped = clipped_terms(
        sequence_log_ratio.clamp(max=MAX_LOG_RATIO), tokens.masked_advantages, clip_low=clip_low, clip_high=clip_high
    )
    return token_loss(terms, tokens.log_ratio, is_clipped, tokens.mask)


def gmpo(tokens: PolicyTokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """Computes -exp(mean of m) A, m = log r clipped to [-clip_low, clip_high] as in PPO (GMPO, arXiv:2507.20673).

    The bounds apply to log r, not to r: 0.4 is a ratio in [0.67, 1.49]. A is the sequence's mean; which side is clipped
    depends on the sign of each token's own advantage.
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low is {clip_low} and clip_high {clip_high}: both bound |log ratio|, so at least 0.")
    log_ratio, advantages = tokens.full_log_ratio, tokens.masked_advantages
    fixed = log_ratio.detach()
    is_held = torch.where(advantages > 0, fixed > clip_high, fixed < -clip_low)
    pessimistic = torch.where(is_held, fixed.clamp(-clip_low, clip_high), log_ratio)
    sequence_log_ratio = tokens.per_sequence(pessimistic).clamp(max=MAX_LOG_RATIO)
    terms = -torch.exp(sequence_log_ratio) * tokens.per_sequence(advantages)
    return token_loss(terms, tokens.log_ratio, is_held & (advantages != 0), tokens.mask)


def vespo(
    tokens: PolicyTokens,
    *,
    k_pos: NotNegative = 2.0,
    lambda_pos: Positive = 3.0,
    k_neg: NotNegative = 3.0,
    lambda_neg: Positive = 2.0,
) -> TokenLoss:
    """Computes -sg(e^lambda w^k e^(-lambda w)) A log policy, w the product of a sequence's ratios (arXiv:2602.10693).

    The weight is 1 at w = 1 and falls smoothly on both sides. k and lambda depend on the sign of the sequence's mean A.
    """
    advantages = tokens.masked_advantages
    sums = sequence_sums(tokens.log_ratio.detach(), tokens.sequence_index, tokens.num_sequences)
    log_w = sums.clamp(_MIN_LOG_WEIGHT, MAX_LOG_RATIO)[tokens.sequence_index]
    is_good = tokens.per_sequence(advantages) >= 0
    k, rate = torch.where(is_good, k_pos, k_neg), torch.where(is_good, lambda_pos, lambda_neg)
    weights = torch.exp(rate + k * log_w - rate * log_w.exp())
    logprobs = torch.where(tokens.mask, tokens.logprobs, 0.0)
    terms = -weights * advantages * logprobs
    return token_loss(terms, tokens.log_ratio, torch.zeros_like(tokens.mask), tokens.mask)
