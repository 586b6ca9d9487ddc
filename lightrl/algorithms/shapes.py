"""Checks against silent broadcasting: [N] with [N, 1] would be an [N, N] loss that still trains."""

from __future__ import annotations

import torch
from torch import Tensor


def require_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError naming every shape unless all are equal."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"These tensors must have one shape, an entry per token: {shapes}.")


def require_bool_mask(mask: Tensor, name: str = "mask") -> None:
    """Raises ValueError unless the mask is of bool, True = counted."""
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name} is of {mask.dtype}: it must be torch.bool, True where a token counts. Use {name}.bool()."
        )


def require_sequence_index(sequence_index: Tensor, mask: Tensor, num_sequences: int) -> None:
    """Raises ValueError unless there is an int64 owner for each of the tokens, which stand in one row."""
    if mask.dim() != 1 or sequence_index.shape != mask.shape or sequence_index.dtype != torch.int64:
        raise ValueError(
            f"sequence_index is {list(sequence_index.shape)} of {sequence_index.dtype}, the mask {list(mask.shape)}: "
            "both must be [N], an entry per response token of the pack, and sequence_index torch.int64."
        )
    if num_sequences < 1 and sequence_index.numel():
        raise ValueError(f"num_sequences is {num_sequences}, but there are {sequence_index.numel()} tokens.")


def require_flat(**tensors: Tensor | None) -> None:
    """Raises ValueError naming every shape unless all that are given are [B] of one length."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(tensor.dim() != 1 for tensor in given.values()) or len({len(tensor) for tensor in given.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
        raise ValueError(f"These tensors must be flat and of one length: {shapes}.")
