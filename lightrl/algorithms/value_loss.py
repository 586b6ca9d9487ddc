"""The loss of a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.losses import require_bool_mask, require_same_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """One loss term per token, to be weighted by an aggregation; only `terms` carries a gradient."""

    terms: Tensor  # [N] 0 where nothing is trained
    is_clipped: Tensor  # [N] bool, the tokens that the clip left without a gradient


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.2
) -> ValueLoss:
    """Computes max((V - R)^2, (V' - R)^2) / 2, where V' is V held within `clip` of the old value.

    Because of the maximum, a value that has already moved too far towards the return gets no gradient.

    Args:
        values: The critic's, [N]; they alone get a gradient.
        old_values: The critic's before the update, [N].
        returns: What the values should be, [N].
        mask: True = trained, [N].
        clip: None computes (V - R)^2 / 2.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    require_bool_mask(mask)
    values, old_values, returns = (
        torch.where(mask, part, 0.0) for part in (values, old_values.detach(), returns.detach())
    )
    errors = (values - returns).square()
    is_clipped = torch.zeros_like(mask)
    if clip is not None:
        if clip <= 0:
            raise ValueError(f"clip is {clip}: it must be more than 0, or None for no clip.")
        moved = values - old_values
        held_errors = (old_values + moved.clamp(-clip, clip) - returns).square()
        # Both conditions are needed: old + (V - old) equals V only up to rounding.
        is_clipped = (moved.detach().abs() > clip) & (held_errors.detach() > errors.detach())
        # Not maximum(): where both are equal, its gradient and that of clamp() depend on torch's version.
        errors = torch.where(is_clipped | held_errors.isnan(), held_errors, errors)
    return ValueLoss(terms=0.5 * errors, is_clipped=is_clipped & mask)
