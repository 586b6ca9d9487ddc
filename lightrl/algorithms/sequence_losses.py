"""Policy losses whose ratio belongs to a whole sequence. The signature is that of losses.py.

Each token carries its sequence's term, so that `sequence_mean` gives the papers' mean over sequences; a sequence never
spans two micro-batches. s is the geometric mean of the sequence's token ratios.
"""

from __future__ import annotations

import torch

from lightrl.algorithms.losses import clipped_terms
from lightrl.algorithms.tokens import PolicyTokens, TokenLoss, token_loss


def gspo(tokens: PolicyTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) (GSPO, arXiv:2507.18071, eq. 5); A the sequence's mean.

    Under sequence_mean the gradient by a token's log probability is -s A / length.
    """
    log_ratio = tokens.log_ratio
    terms, is_clipped = clipped_terms(
        tokens.per_sequence(log_ratio),
        tokens.per_sequence(tokens.masked_advantages),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return token_loss(terms, log_ratio, is_clipped, tokens.mask)


def gspo_token(tokens: PolicyTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """gspo with sg(s) policy / sg(policy) in the place of s (arXiv:2507.18071, eq. 13): each token keeps its own A.

    Where a sequence's advantages are equal its value and gradient are those of gspo under sequence_mean.
    """
    log_ratio = tokens.log_ratio
    sequence_log_ratio = tokens.per_sequence(log_ratio.detach()) + log_ratio - log_ratio.detach()
    terms, is_clipped = clipped_terms(
        sequence_log_ratio, tokens.masked_advantages, clip_low=clip_low, clip_high=clip_high
    )
    return token_loss(terms, log_ratio, is_clipped, tokens.mask)


def gmpo(tokens: PolicyTokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """-exp(mean of m) A, m = log r clipped to [-clip_low, clip_high] as PPO clips it (GMPO, arXiv:2507.20673).

    The bounds are of log r, not of r: 0.4 is a ratio in [0.67, 1.49]. A is the sequence's mean; which side is clipped
    follows the sign of each token's own.
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low is {clip_low} and clip_high {clip_high}: both bound |log ratio|, so at least 0.")
    log_ratio, advantages = tokens.log_ratio, tokens.masked_advantages
    clipped = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    terms = -torch.exp(tokens.per_sequence(pessimistic)) * tokens.per_sequence(advantages)
    fixed = log_ratio.detach()
    is_clipped = ((fixed < -clip_low) & (advantages < 0)) | ((fixed > clip_high) & (advantages > 0))
    return token_loss(terms, log_ratio, is_clipped, tokens.mask)
