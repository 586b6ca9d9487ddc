"""On-policy distillation: the policy's own samples, judged token by token by a teacher.

What is made small is KL(policy || teacher), the reverse KL, which a sampled token estimates as log policy - log
teacher (https://thinkingmachines.ai/blog/on-policy-distillation, arXiv:2306.13649).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.algorithms.kl import kl_terms
from lightrl.algorithms.shapes import require_bool_mask, require_same_shape


def distillation_advantages(
    old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, coef: float = 1.0
) -> Tensor:
    """[N] coef (log teacher - log policy): an advantage per token for any policy loss, alone or added to a reward's.

    Args:
        old_logprobs: of the policy that sampled, so that the advantage stays the same over the updates of a step.
    """
    require_same_shape(old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    require_bool_mask(mask)
    return torch.where(mask, coef * (teacher_logprobs - old_logprobs), 0.0).detach()


def distillation_terms(
    logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, old_logprobs: Tensor | None = None
) -> Tensor:
    """[N] the sampled reverse KL as a loss, with the KL's gradient; weighed by policy / old where old is given."""
    return kl_terms(policy=logprobs, reference=teacher_logprobs, mask=mask, kind="k1", gradient="kl", old=old_logprobs)


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """[N] KL(policy || teacher) summed over the whole vocabulary, exactly.

    Args:
        logprobs: [N, V] normalised log probabilities. Give it a chunk of tokens at a time: V is large.
    """
    require_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    probabilities = logprobs.exp()
    # A token that neither has (-inf in both) counts 0, not NaN.
    difference = torch.where(probabilities > 0, logprobs - teacher_logprobs.detach(), 0.0)
    return (probabilities * difference).sum(dim=-1)
