"""Which tokens of a whole batch to treat apart: of largest covariance, of highest entropy, some at random.

All of it is decided over the batch of an update before that is split. What needs other ranks comes in as an argument:
sums to add up over ranks, or values gathered from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_bool_mask, require_same_shape


def covariance_sums(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: trained tokens, sum of their log probabilities, sum of their advantages. Add them over ranks."""
    require_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    require_bool_mask(mask)
    columns = [torch.where(mask, values.detach().double(), 0.0).sum() for values in (logprobs, advantages)]
    return torch.stack([mask.sum().double(), *columns])


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """(log probability - its mean) (advantage - its mean) of each token, 0 where nothing is trained.

    Args:
        sums: covariance_sums of the whole batch, added over ranks.
    """
    count = sums[0].clamp(min=1)
    logprob_mean, advantage_mean = (sums[1] / count).to(logprobs.dtype), (sums[2] / count).to(advantages.dtype)
    product = (logprobs.detach() - logprob_mean) * (advantages.detach() - advantage_mean)
    return torch.where(mask, product, 0.0)


def top_threshold(values: Tensor, fraction: float) -> float:
    """The smallest of the largest `fraction` of the values; at least one value is among them.

    Args:
        values: [M] of all trained tokens of the batch, on every rank the same.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}: it must be more than 0 and at most 1.")
    if not values.numel():
        return float("inf")
    count = max(1, int(fraction * values.numel()))
    return float(values.topk(count).values[-1])


def select_top(values: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """[N] bool: trained tokens with a value of at least top_threshold. Ties at the threshold are all selected.

    Of covariances this is KL-Cov's choice (arXiv:2505.22617; fraction 0.002), of entropies that of the tokens where a
    response forks (arXiv:2506.01939; fraction 0.2), whose loss is then weighed by this mask.
    """
    return (values >= threshold) & mask


def clip_cov_candidates(covariance: Tensor, mask: Tensor, *, low: float = 1.0, high: float = 5.0) -> Tensor:
    """[N] bool: trained tokens whose covariance is within [low, high]. Their number is to be added over ranks."""
    return (covariance >= low) & (covariance <= high) & mask


def select_clip_cov(
    candidates: Tensor, uniforms: Tensor, *, num_candidates: int, num_tokens: int, fraction: float = 2e-4
) -> Tensor:
    """[N] bool: each candidate with the chance that makes `fraction` of all tokens the expected number.

    Args:
        uniforms: [N] of token_uniforms: drawn by name, so that the choice does not hang on the split.
        num_candidates: of the whole batch, over all ranks, as is num_tokens.
    """
    chance = fraction * num_tokens / max(1, num_candidates)
    return candidates & (uniforms < chance)


def token_uniforms(sequence_ids: Tensor, positions: Tensor, *, seed: int) -> Tensor:
    """[N] float64 in [0, 1), a function of the sequence's id, the token's place in it and the seed alone.

    Args:
        sequence_ids: [N] int64, the same for a sequence on whatever rank and in whatever micro-batch it is.
    """
    state = _mix(_mix(_mix(torch.full_like(positions, seed)) + sequence_ids) + positions)
    return _shifted(state, 11).double() / 2.0**53


def _mix(state: Tensor) -> Tensor:
    """One step of splitmix64; int64 arithmetic wraps around as the algorithm wants it."""
    state = state - 0x61C8864680B583EB  # = + 0x9E3779B97F4A7C15 modulo 2^64
    state = (state ^ _shifted(state, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    state = (state ^ _shifted(state, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, places: int) -> Tensor:
    """A logical shift to the right; that of torch would fill with the sign."""
    return (state >> places) & ((1 << (64 - places)) - 1)
