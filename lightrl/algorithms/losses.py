"""Policy losses over response tokens. They return sums: the caller divides by a count that it took over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_bool_mask, require_same_shape


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
    """The sum of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(logprobs - old_logprobs).

    PPO (arXiv:1707.06347, eq. 7); two different bounds are DAPO's clip-higher (arXiv:2503.14476). A gradient flows to
    logprobs alone. With nothing trained the sum is 0 and its backward still runs, as every rank must run one.

    Args:
        logprobs: any shape, shared by all four tensors, an entry per token.
        mask: bool, True = trained. What stands elsewhere is never read, be it NaN.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    require_bool_mask(mask)
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(
            f"clip_low is {clip_low} and clip_high {clip_high}: the ratio is kept in [1 - clip_low, 1 + clip_high], "
            "so clip_low must be in [0, 1] and clip_high at least 0."
        )
    # Masked before exp and product, not after: 0 * NaN in the backward would be NaN.
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    ratio = torch.exp(log_ratio)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_sum = -torch.minimum(ratio * advantages, clipped_ratio * advantages).sum()

    ratio = ratio.detach()
    is_clipped = ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))
    trained_ratio = torch.where(mask, ratio, 0.0)
    return PolicyLoss(
        loss_sum=loss_sum,
        clip_count=is_clipped.sum(),
        ratio_sum=trained_ratio.sum(),
        ratio_max=trained_ratio.max() if ratio.numel() else trained_ratio.sum(),
        num_tokens=mask.sum(),
    )


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of the values where the mask is True; with none, a 0 whose gradient is 0 but flows."""
    require_same_shape(values=values, mask=mask)
    require_bool_mask(mask)
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
