"""The entropy bonus, and its coefficient, which can follow a target."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.algorithms.losses import require_bool_mask, require_same_shape


def entropy_bonus(entropy: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """Returns -coef x the entropy of each trained token, [N], to add to the terms of the policy loss."""
    require_same_shape(entropy=entropy, mask=mask)
    require_bool_mask(mask)
    return -coef * torch.where(mask, entropy, 0.0)


def next_entropy_coef(coef: float, *, entropy: float, target: float, step: float = 0.005) -> float:
    """Moves the coefficient by `step` so that the entropy nears the target, within [0, 1] (arXiv:2505.22312)."""
    if entropy == target:
        return coef
    return min(1.0, max(0.0, coef + (step if entropy < target else -step)))


def active_entropy_coef(coef: float, *, entropy: float, target: float) -> float:
    """Returns the coefficient to apply: 0 above the target, where a bonus would raise the entropy further."""
    return coef if entropy <= target else 0.0
