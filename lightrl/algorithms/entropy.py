"""The entropy bonus. Its coefficient may follow a target (controllers.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_bool_mask, require_same_shape


def entropy_bonus(entropy: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """[N] -coef times the entropy of each trained token, a term to add to those of the policy loss."""
    require_same_shape(entropy=entropy, mask=mask)
    require_bool_mask(mask)
    return -coef * torch.where(mask, entropy, 0.0)
