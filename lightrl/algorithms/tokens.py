"""Tokens of a micro-batch of whole sequences laid end to end: what a loss reads and returns, and sums per sequence.

It also holds the checks against silent broadcasting: [N] with [N, 1] would be an [N, N] loss that still trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Ratios beyond e^20 = 4.9e8 are too large to train on: they are held there, without a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The tokens of one micro-batch; entries where the mask is False are never read and may be NaN."""

    logprobs: Tensor  # [N] of the policy being trained: the only entry that gets a gradient
    old_logprobs: Tensor  # [N] of the policy that the ratio is taken to
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool, True = trained
    sequence_index: Tensor  # [N] int64 in [0, num_sequences): the sequence of each token
    num_sequences: int
    selected: Tensor | None = None  # [N] bool, for losses that select tokens (see selection.py)

    def __post_init__(self) -> None:
        require_same_shape(
            logprobs=self.logprobs, old_logprobs=self.old_logprobs, advantages=self.advantages, mask=self.mask
        )
        require_bool_mask(self.mask)
        require_sequence_index(self.sequence_index, self.mask, self.num_sequences)
        if self.selected is not None:
            require_same_shape(selected=self.selected, mask=self.mask)
            require_bool_mask(self.selected, name="selected")

    @property
    def log_ratio(self) -> Tensor:
        """The log of policy / old policy, [N], 0 where nothing is trained."""
        return masked_log_ratio(self.logprobs, self.old_logprobs, self.mask)

    @property
    def masked_advantages(self) -> Tensor:
        """The advantages, [N], detached, 0 where nothing is trained."""
        return torch.where(self.mask, self.advantages.detach(), 0.0)

    def per_sequence(self, values: Tensor) -> Tensor:
        """Gives each token, [N], the mean of the values over the trained tokens of its sequence."""
        return sequence_means(values, self.mask, self.sequence_index, self.num_sequences)[self.sequence_index]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """One term per token, which an aggregation weighs and adds; only `terms` carries a gradient."""

    terms: Tensor  # [N] 0 where nothing is trained
    ratio: Tensor  # [N] before any clip, 0 where nothing is trained
    is_clipped: Tensor  # [N] bool, the tokens that the loss's own rule clipped or left out


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns log(new / old), at most MAX_LOG_RATIO, 0 where the mask is False.

    The mask is applied before any exp or product, since 0 * NaN in a backward is NaN.
    """
    return torch.where(mask, logprobs - old_logprobs.detach(), 0.0).clamp(max=MAX_LOG_RATIO)


def token_loss(terms: Tensor, log_ratio: Tensor, is_clipped: Tensor, mask: Tensor) -> TokenLoss:
    """Builds a TokenLoss and sets the entries of untrained tokens to 0."""
    ratio = torch.exp(log_ratio.detach())
    return TokenLoss(
        terms=torch.where(mask, terms, 0.0), ratio=torch.where(mask, ratio, 0.0), is_clipped=is_clipped & mask
    )


def sequence_sums(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Adds the values, [N], of each sequence: [num_sequences]."""
    return values.new_zeros(num_sequences).index_add(0, sequence_index, values)


def sequence_means(values: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Averages each sequence's values where the mask is True, [num_sequences]; 0 where a sequence has none."""
    total = sequence_sums(torch.where(mask, values, 0.0), sequence_index, num_sequences)
    return total / sequence_sums(mask.to(total.dtype), sequence_index, num_sequences).clamp(min=1)


def require_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError naming every shape unless all are equal."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        raise _wrong_shapes("have one shape, an entry per token", tensors)


def require_bool_mask(mask: Tensor, name: str = "mask") -> None:
    """Raises ValueError unless the mask is of bool, True = counted."""
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name} is of {mask.dtype}: it must be torch.bool, True where a token counts. Use {name}.bool()."
        )


def require_sequence_index(sequence_index: Tensor, mask: Tensor, num_sequences: int) -> None:
    """Raises ValueError unless mask and index are [N] and the index gives an int64 sequence for each token."""
    if mask.dim() != 1 or sequence_index.shape != mask.shape or sequence_index.dtype != torch.int64:
        raise _wrong_index(sequence_index, mask)
    if num_sequences < 1 and sequence_index.numel():
        raise ValueError(f"num_sequences is {num_sequences}, but there are {sequence_index.numel()} tokens.")


def require_flat(**tensors: Tensor | None) -> None:
    """Raises ValueError naming every shape unless all that are given are [B] of one length."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(tensor.dim() != 1 for tensor in given.values()) or len({len(tensor) for tensor in given.values()}) > 1:
        raise _wrong_shapes("be flat and of one length", given)


def _wrong_shapes(wanted: str, tensors: Mapping[str, Tensor]) -> ValueError:
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    return ValueError(f"These tensors must {wanted}: {shapes}.")


def _wrong_index(sequence_index: Tensor, mask: Tensor) -> ValueError:
    return ValueError(
        f"sequence_index is {list(sequence_index.shape)} of {sequence_index.dtype}, the mask {list(mask.shape)}: both "
        "must be [N], an entry per response token of the pack, and sequence_index torch.int64."
    )
