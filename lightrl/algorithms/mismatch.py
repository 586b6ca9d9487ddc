"""How far the engine's log probabilities are from the trainer's, for the same tokens and the same weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.algorithms.kl import kl_estimate
from lightrl.algorithms.shapes import require_bool_mask, require_same_shape


@torch.no_grad()
def mismatch_statistics(trainer: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Scalars to reduce over micro-batches and ranks: "max_abs" by maximum, the others by sum.

    max_abs and sum_abs are of the difference of log probabilities, sum_k3 of the k3 estimate of KL(sampler || trainer)
    (the sampler drew the tokens), and count is of the tokens where the mask is True. With none, all are 0.
    """
    require_same_shape(trainer=trainer, sampler=sampler, mask=mask)
    require_bool_mask(mask)
    trainer, sampler = (torch.where(mask, logprobs.float(), 0.0) for logprobs in (trainer, sampler))
    difference = (trainer - sampler).abs()
    return {
        "max_abs": difference.max() if difference.numel() else difference.sum(),
        "sum_abs": difference.sum(),
        "sum_k3": kl_estimate(policy=sampler, reference=trainer, kind="k3").sum(),
        "count": mask.sum(),
    }
