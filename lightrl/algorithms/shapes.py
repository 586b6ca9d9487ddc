"""Checks against silent broadcasting: [N] with [N, 1] would be an [N, N] loss that still trains."""

from __future__ import annotations

import torch
from torch import Tensor


def require_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError naming every shape unless all are equal."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"These tensors must have one shape, an entry per token: {shapes}.")


def require_bool_mask(mask: Tensor) -> None:
    """Raises ValueError unless the mask is of bool, True = counted."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is of {mask.dtype}: it must be torch.bool, True where a token counts. Use mask.bool().")
