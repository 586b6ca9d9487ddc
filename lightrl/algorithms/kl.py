"""Estimates of the KL divergence from tokens that the policy itself sampled (http://joschu.net/blog/kl-approx.html).

The value of an estimate and its gradient are two things. d = policy - reference, in log probabilities; averaged over
the policy's samples:
- k1 = d has the KL as its value and no gradient at all: good in a reward, useless in a loss.
- k2 = d^2 / 2 has a biased value and the KL's gradient, d times that of the log probability.
- k3 = exp(-d) - 1 + d has the KL as its value, never negative, and the gradient of KL(reference || policy).
`kl_terms(gradient="kl")` takes the value of any of them and the gradient of the KL.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_bool_mask, require_same_shape
from lightrl.algorithms.tokens import masked_log_ratio

KLKind = Literal["k1", "k2", "k3"]
KLGradient = Literal["own", "kl"]


def kl_estimate(*, policy: Tensor, reference: Tensor, kind: KLKind) -> Tensor:
    """KL(policy || reference) at each token, from the log probabilities that the two give it.

    With d = policy - reference: k1 = d (unbiased, of any sign), k2 = d^2 / 2 (biased, small variance), and
    k3 = exp(-d) - 1 + d (unbiased, never negative; GRPO's). No gradient flows to the reference.

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


def kl_terms(
    *,
    policy: Tensor,
    reference: Tensor,
    mask: Tensor,
    kind: KLKind = "k3",
    gradient: KLGradient = "own",
    old: Tensor | None = None,
) -> Tensor:
    """The KL of each token as a term of the loss, 0 where the mask is False.

    Args:
        gradient: "own" is that of the estimate; "kl" is that of the KL, d times the gradient of the log probability.
        old: log probabilities of the policy that sampled. Given, every term is weighed by policy / old, without which
            both value and gradient are wrong off policy. With k3 and "kl" this is DeepSeek-V3.2's unbiased estimate.
    """
    require_same_shape(policy=policy, reference=reference, mask=mask)
    require_bool_mask(mask)
    # Masked before the estimate: exp of a masked token may overflow, and 0 * inf in the backward is NaN.
    policy, reference = (torch.where(mask, logprobs, 0.0) for logprobs in (policy, reference))
    terms = kl_estimate(policy=policy, reference=reference, kind=kind)
    if gradient == "kl":
        slope = kl_estimate(policy=policy, reference=reference, kind="k2")
        terms = terms.detach() + slope - slope.detach()
    elif gradient != "own":
        raise ValueError(f"Unknown KL gradient {gradient!r}. Choose one of {', '.join(get_args(KLGradient))}.")
    if old is not None:
        terms = terms * torch.exp(masked_log_ratio(policy.detach(), old, mask))
    return terms
