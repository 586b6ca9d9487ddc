"""Estimates of the KL divergence from tokens that the policy itself sampled (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_same_shape

KLKind = Literal["k1", "k2", "k3"]


def kl_estimate(*, policy: Tensor, reference: Tensor, kind: KLKind) -> Tensor:
    """KL(policy || reference) at each token, from the log probabilities that the two give it.

    With d = policy - reference: k1 = d (unbiased, of any sign), k2 = d^2 / 2 (biased, small variance), and
    k3 = exp(-d) - 1 + d (unbiased, never negative; GRPO's). As a term of the loss they differ again: averaged over the
    policy's samples the gradient of k1 is 0, and that of k2 is the gradient of the KL. None flows to the reference.

    Args:
        policy: any shape, an entry per token, as has the reference.
    """
    require_same_shape(policy=policy, reference=reference)
    log_ratio = policy - reference.detach()
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        # expm1, since exp(-d) - 1 in float32 keeps no correct digit of d^2 / 2 for |d| below 3e-4.
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"Unknown KL estimate {kind!r}. Choose one of {', '.join(get_args(KLKind))}.")
