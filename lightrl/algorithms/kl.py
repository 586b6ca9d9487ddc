"""KL divergences estimated from sampled tokens: policy and reference, engine and trainer, policy and teacher.

The estimates are those of http://joschu.net/blog/kl-approx.html. An estimate's value and its gradient are two different
things. With d = policy - reference, in log probabilities, and averaged over the policy's own samples:
- k1 = d has the KL as its value and no gradient at all: good in a reward, useless in a loss.
- k2 = d^2 / 2 has a biased value and the KL's gradient: d times the gradient of the log probability.
- k3 = exp(-d) - 1 + d has the KL as its value, never negative, and the gradient of KL(reference || policy). Where the
  reference finds a token more than e^30 = 1e13 times likelier than the policy, d is held at -30, without a gradient.
`kl_terms(gradient="kl")` combines the value of any of them, or of a function of a user, with the gradient of the KL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightrl.algorithms.losses import (
    k3,
    masked_difference,
    masked_log_ratio,
    nan_unless_finite,
    require_bool_mask,
    require_same_shape,
)

KLKind = Literal["k1", "k2", "k3"]
KLGradient = Literal["own", "kl"]
Estimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # of log probabilities: the policy's, the reference's


def kl_estimate(*, policy: Tensor, reference: Tensor, kind: KLKind) -> Tensor:
    """Estimates KL(policy || reference) at each token from its log probabilities under both.

    With d = policy - reference: k1 = d (unbiased, of any sign), k2 = d^2 / 2 (biased, small variance), and
    k3 = exp(-d) - 1 + d (unbiased, never negative; GRPO's), with d held at -30 or above. No gradient flows to the
    reference. Where d is not finite, the estimate is NaN.

    Args:
        policy: Log probabilities, any shape, an entry per token.
        reference: The shape of policy.
        kind: The estimate.
    """
    require_same_shape(policy=policy, reference=reference)
    log_ratio = nan_unless_finite(policy - reference.detach())
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        return k3(-log_ratio)
    raise ValueError(f"Unknown KL estimate {kind!r}. Choose one of {', '.join(get_args(KLKind))}.")


def k1_of(policy: Tensor, reference: Tensor) -> Tensor:
    """Returns k1 = policy - reference of each token."""
    return kl_estimate(policy=policy, reference=reference, kind="k1")


def k2_of(policy: Tensor, reference: Tensor) -> Tensor:
    """Returns k2 = (policy - reference)^2 / 2 of each token."""
    return kl_estimate(policy=policy, reference=reference, kind="k2")


def k3_of(policy: Tensor, reference: Tensor) -> Tensor:
    """Returns k3 = exp(-d) - 1 + d of each token, with d = policy - reference."""
    return kl_estimate(policy=policy, reference=reference, kind="k3")


def kl_terms(
    *,
    policy: Tensor,
    reference: Tensor,
    mask: Tensor,
    kind: KLKind | Estimator = "k3",
    gradient: KLGradient = "own",
    old: Tensor | None = None,
) -> Tensor:
    """Returns the KL of each token as a term of the loss, 0 where the mask is False.

    Args:
        policy: Log probabilities, any shape, an entry per token. They alone get a gradient.
        reference: The shape of policy.
        mask: True = trained.
        kind: The estimate, by name, or a function fn(policy, reference) that returns one per token.
        gradient: "own" is that of the estimate; "kl" is that of the KL, d times the gradient of the log probability.
        old: Log probabilities of the policy that sampled. If given, every term is weighted by policy / old; without
            the weight, value and gradient are wrong off policy. With k3 and "kl" this is DeepSeek-V3.2's unbiased
            estimate.
    """
    require_same_shape(policy=policy, reference=reference, mask=mask)
    require_bool_mask(mask)
    # Masked before the estimate: exp of a masked token may overflow, and 0 * inf in the backward is NaN.
    policy, reference = (torch.where(mask, logprobs, 0.0) for logprobs in (policy, reference))
    if callable(kind):
        terms = torch.where(mask, kind(policy, reference.detach()), 0.0)
    else:
        terms = kl_estimate(policy=policy, reference=reference, kind=kind)
    if gradient == "kl":
        slope = kl_estimate(policy=policy, reference=reference, kind="k2")
        terms = terms.detach() + slope - slope.detach()
    elif gradient != "own":
        raise ValueError(f"Unknown KL gradient {gradient!r}. Choose one of {', '.join(get_args(KLGradient))}.")
    if old is not None:
        terms = terms * torch.exp(masked_log_ratio(policy.detach(), old, mask))
    return terms


def add_kl(terms: Tensor, kl: Tensor, *, coef: float) -> Tensor:
    """Adds the KL penalty to the loss: the policy loss's terms + coef x the KL of each token (kl_terms), [N]."""
    return terms + coef * kl


def next_kl_coef(coef: float, *, kl: float, target: float, num_samples: int, horizon: int = 10_000) -> float:
    """Moves the coefficient so that the KL nears its target: coef (1 + e num_samples / horizon) (arXiv:1909.08593).

    The error e = kl / target - 1 is clipped to [-0.2, 0.2]. The paper's factor is 0.1 at every step; the factor
    num_samples / horizon is TRL's.

    Args:
        coef: The coefficient of this step.
        kl: The KL measured over all ranks.
        target: The wanted KL.
        num_samples: Samples trained on in this step.
        horizon: Samples over which the coefficient can grow by a fifth.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target is {target} and horizon {horizon}: both must be more than 0.")
    error = min(0.2, max(-0.2, kl / target - 1))
    return coef * (1 + error * num_samples / horizon)


# ---- Policy and teacher: on-policy distillation ----------------------------------------------------------------------
# Its objective is KL(policy || teacher), the reverse KL, which a sampled token estimates as log policy - log teacher
# (https://thinkingmachines.ai/blog/on-policy-distillation, arXiv:2306.13649).


def distillation_advantages(
    old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, coef: float = 1.0
) -> Tensor:
    """Returns coef (log teacher - log policy), [N]: an advantage per token, alone or to add to a reward's.

    Args:
        old_logprobs: Of the policy that sampled, so that the advantage stays the same over the updates of a step.
        teacher_logprobs: Of the teacher, [N].
        mask: True = trained, [N].
        coef: The weight of the teacher.
    """
    require_same_shape(old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    require_bool_mask(mask)
    return coef * masked_difference(teacher_logprobs, old_logprobs, mask).detach()


def distillation_terms(
    logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, old_logprobs: Tensor | None = None
) -> Tensor:
    """Returns the sampled reverse KL as loss terms, [N], with the KL's gradient, weighted by policy / old if given."""
    return kl_terms(policy=logprobs, reference=teacher_logprobs, mask=mask, kind="k1", gradient="kl", old=old_logprobs)


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Computes KL(policy || teacher) exactly, [N], by a sum over the whole vocabulary.

    Args:
        logprobs: Normalised log probabilities, [N, V]. Pass a chunk of tokens at a time: V is large.
        teacher_logprobs: The same for the teacher, [N, V].
    """
    require_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    probabilities = logprobs.exp()
    # A token that both exclude (-inf in both) counts 0, not NaN.
    difference = torch.where(probabilities > 0, logprobs - teacher_logprobs.detach(), 0.0)
    return (probabilities * difference).sum(dim=-1)
