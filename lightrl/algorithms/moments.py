"""Mean and variance over everything that any rank holds: each gives its sums, they are added, each applies them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_same_shape

_ROUNDING = 1e-6  # a deviation below this share of the mean is rounding: all values are equal


def moment_sums(values: Tensor, weights: Tensor) -> Tensor:
    """[3] float64: sums of the weights, of weight x value, of weight x value^2. Add them over micro-batches and ranks.

    Args:
        weights: the shape of values: a mask, or how many tokens share a sample's value. What has weight 0 is not read.
    """
    require_same_shape(values=values, weights=weights)
    weights = weights.detach().double()
    values = torch.where(weights > 0, values.detach().double(), 0.0)
    return torch.stack([weights.sum(), (weights * values).sum(), (weights * values.square()).sum()])


def mean_and_std(sums: Tensor) -> tuple[float, float]:
    """The mean and the deviation, divided by the count (no Bessel); exactly 0 where all values are equal."""
    count = max(float(sums[0]), 1.0)
    mean = float(sums[1]) / count
    std = max(float(sums[2]) / count - mean**2, 0.0) ** 0.5
    return mean, std if std > _ROUNDING * abs(mean) else 0.0


def whiten(values: Tensor, sums: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(values - mean) / (deviation + eps). Where all values are equal they become 0, or stay if shift_mean is False.

    Args:
        sums: moment_sums of all that the values are compared with, over all ranks.
        shift_mean: False leaves the mean where it is, and so the sign of each value.
    """
    mean, std = mean_and_std(sums)
    if std == 0:
        return torch.zeros_like(values) if shift_mean else values.clone()
    scaled = (values - mean) / (std + eps)
    return scaled if shift_mean else scaled + mean


def clip_values(values: Tensor, limit: float) -> Tensor:
    """Rewards or advantages held in [-limit, limit]."""
    if limit <= 0:
        raise ValueError(f"limit is {limit}: values are held in [-limit, limit], so it must be more than 0.")
    return values.clamp(-limit, limit)
