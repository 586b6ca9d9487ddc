"""Importance weights for tokens of another policy than the trained one: an engine that rounds, or an older version.

A correction is `fn(tokens: OffPolicyTokens, **parameters) -> Correction`. Its weights multiply the terms of any policy
loss (`corrected`); a weight of 0 rejects a token but leaves the mask, and so the denominator, as they are. The
statistics describe the ratio before anything is clipped or rejected.

Decoupled PPO (arXiv:2110.00641) is ppo_clip with the proximal policy's logprobs as the old ones, corrected by the
ratio of the proximal to the sampling policy. The proximal policy is recomputed, or `interpolated_logprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.algorithms.losses import (
    MAX_LOG_RATIO,
    TokenLoss,
    k3,
    masked_difference,
    require_same_shape,
    require_sequence_index,
    sequence_means,
    sequence_sums,
)

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyTokens:
    """The tokens of one micro-batch of whole sequences; entries where the mask is False are never read."""

    logprobs: Tensor  # [N] of the trainer's policy before the update (the proximal policy)
    sampler_logprobs: Tensor  # [N] of the policy that sampled
    mask: Tensor  # [N] bool, True = trained
    sequence_index: Tensor  # [N] int64 in [0, num_sequences)
    num_sequences: int

    def __post_init__(self) -> None:
        require_same_shape(logprobs=self.logprobs, sampler_logprobs=self.sampler_logprobs, mask=self.mask)
        require_sequence_index(self.sequence_index, self.mask, self.num_sequences)

    @torch.no_grad()
    def log_ratio(self, level: Level) -> Tensor:
        """Returns log(trainer / sampler) for each token, [N]: its own, or the sum or mean over its sequence."""
        token = masked_difference(self.logprobs, self.sampler_logprobs, self.mask)
        if level == "token":
            return token
        if level == "sequence":
            return sequence_sums(token, self.sequence_index, self.num_sequences)[self.sequence_index]
        if level == "geometric":
            return sequence_means(token, self.mask, self.sequence_index, self.num_sequences)[self.sequence_index]
        raise ValueError(f"Unknown level {level!r}. Choose one of {', '.join(get_args(Level))}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A weight per token, and statistics; neither carries a gradient."""

    weights: Tensor  # [N], 0 where nothing is trained
    statistics: dict[str, Tensor]  # scalars to reduce over micro-batches and ranks: ratio_max by maximum, others by sum


def truncated(tokens: OffPolicyTokens, *, level: Level = "token", cap: float = 2.0) -> Correction:
    """Weights each token by min(ratio, cap): truncated importance sampling (TIS; arXiv:1802.01561)."""
    if cap <= 0:
        raise ValueError(f"cap is {cap}: the ratio is held below it, so it must be more than 0.")
    ratio = _ratio(tokens, level)
    return _correction(tokens, ratio, ratio > cap, ratio.clamp(max=cap))


def masked(tokens: OffPolicyTokens, *, level: Level = "token", low: float = 0.0, high: float = 2.0) -> Correction:
    """Weights each token by its ratio if that is in [low, high], otherwise by 0: masked importance sampling (MIS)."""
    ratio = _ratio(tokens, level)
    is_outside = _outside(ratio, low, high)
    return _correction(tokens, ratio, is_outside, torch.where(is_outside, 0.0, ratio))


def icepop(tokens: OffPolicyTokens, *, low: float = 0.5, high: float = 5.0) -> Correction:
    """Applies `masked` to the ratios of single tokens, with both bounds (IcePop, arXiv:2510.18855)."""
    return masked(tokens, level="token", low=low, high=high)


def rejected(tokens: OffPolicyTokens, *, level: Level = "geometric", low: float = 0.5, high: float = 2.0) -> Correction:
    """Weights each token by 1 if its ratio is in [low, high], otherwise by 0."""
    ratio = _ratio(tokens, level)
    is_outside = _outside(ratio, low, high)
    return _correction(tokens, ratio, is_outside, torch.where(is_outside, 0.0, 1 + 0 * ratio))  # NaN stays NaN


def corrected(loss: TokenLoss, weights: Tensor) -> TokenLoss:
    """Multiplies the loss's terms by the weights; terms of weight 0 are not read and get no gradient."""
    require_same_shape(terms=loss.terms, weights=weights)
    weights = weights.detach()
    return replace(loss, terms=torch.where(weights > 0, loss.terms, 0.0) * weights)


def far_off_policy(tokens: OffPolicyTokens, advantages: Tensor, *, threshold: float) -> Tensor:
    """Returns the tokens, [N] bool, of the sequences that DeepSeek-V3.2 masks out (arXiv:2512.02556, eq. 9).

    Their mean advantage is negative, and the mean of log(sampler / trainer) over their trained tokens, an estimate of
    the KL, is above the threshold. A policy that no longer writes such a sequence need not be pushed away from it.
    """
    means = sequence_means(advantages, tokens.mask, tokens.sequence_index, tokens.num_sequences)
    return (means[tokens.sequence_index] < 0) & (-tokens.log_ratio("geometric") > threshold)


def interpolated_logprobs(
    logprobs: Tensor, sampler_logprobs: Tensor, *, versions: Tensor, proximal_version: int, current_version: int
) -> Tensor:
    """Interpolates the log probabilities of a proximal policy between the sampling and the current one, [N].

    They are a log current + (1 - a) log sampler, and need no forward. Here a says how far the proximal version lies
    between the sampling and the current version, (proximal - sampled) / (current - sampled); it is 0 for tokens that
    the current version sampled.

    Args:
        logprobs: Of the current policy, [N].
        sampler_logprobs: Of the policy that sampled, [N].
        versions: Weight version that sampled each token, [N] int64.
        proximal_version: Weight version of the proximal policy.
        current_version: Weight version of the current policy.
    """
    require_same_shape(logprobs=logprobs, sampler_logprobs=sampler_logprobs, versions=versions)
    share = proximal_share(versions, proximal_version=proximal_version, current_version=current_version)
    return torch.lerp(sampler_logprobs.detach(), logprobs.detach(), share.to(logprobs.dtype))


def proximal_share(versions: Tensor, *, proximal_version: int, current_version: int) -> Tensor:
    """Returns the factor a of interpolated_logprobs(), [N]: 0 is the policy that sampled a token, 1 the current one."""
    if proximal_version > current_version:
        raise ValueError(f"proximal_version is {proximal_version}, after current_version {current_version}.")
    behind = current_version - versions
    share = ((proximal_version - versions) / behind.clamp(min=1)).clamp(0, 1)
    return torch.where(behind > 0, share, 0.0)


def _ratio(tokens: OffPolicyTokens, level: Level) -> Tensor:
    return tokens.log_ratio(level).clamp(max=MAX_LOG_RATIO).exp()


def _outside(ratio: Tensor, low: float, high: float) -> Tensor:
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"low is {low} and high {high}: they bound a ratio that is 1 on policy, so 0 <= low <= 1 <= high."
        )
    return (ratio < low) | (ratio > high)


def _correction(tokens: OffPolicyTokens, ratio: Tensor, is_outside: Tensor, weights: Tensor) -> Correction:
    mask = tokens.mask
    log_ratio = tokens.log_ratio("token").clamp(max=MAX_LOG_RATIO)
    trained_ratio = torch.where(mask, ratio, 0.0)
    return Correction(
        weights=torch.where(mask, weights, 0.0),
        statistics={
            "ratio_sum": trained_ratio.sum(),
            "ratio_max": trained_ratio.max() if trained_ratio.numel() else trained_ratio.sum(),
            "outside_count": (is_outside & mask).sum(),
            "k3_sum": k3(log_ratio).sum(),  # of KL(sampler || trainer), by token at any level
            "count": mask.sum(),
        },
    )
