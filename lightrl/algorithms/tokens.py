"""What a loss reads and returns: one entry per response token of a micro-batch of whole sequences, laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_bool_mask, require_same_shape, require_sequence_index

MAX_LOG_RATIO = 20.0
"""Beyond a ratio of e^20 = 4.9e8 nothing is a number to train on: it is held there, with no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The tokens of one micro-batch. What stands where the mask is False is never read, be it NaN."""

    logprobs: Tensor  # [N] of the policy being trained: the only entry that gets a gradient
    old_logprobs: Tensor  # [N] of the policy that the ratio is taken to
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool, True = trained
    sequence_index: Tensor  # [N] int64 in [0, num_sequences): whose token it is
    num_sequences: int
    selected: Tensor | None = None  # [N] bool, for the losses that treat some tokens apart (see selection.py)

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
        """[N] log(policy / old policy), 0 where nothing is trained."""
        return masked_log_ratio(self.logprobs, self.old_logprobs, self.mask)

    @property
    def masked_advantages(self) -> Tensor:
        """[N] without a gradient, 0 where nothing is trained."""
        return torch.where(self.mask, self.advantages.detach(), 0.0)

    def per_sequence(self, values: Tensor) -> Tensor:
        """[N] each token has the mean of the values over its sequence's trained tokens."""
        return sequence_means(values, self.mask, self.sequence_index, self.num_sequences)[self.sequence_index]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """One term per token. An aggregation weighs and adds them; only `terms` carries a gradient."""

    terms: Tensor  # [N] 0 where nothing is trained
    ratio: Tensor  # [N] as it was before any clip, 0 where nothing is trained
    is_clipped: Tensor  # [N] bool, the tokens that the loss's own rule clipped or left out


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(new / old), at most MAX_LOG_RATIO; masked before any exp or product: 0 * NaN in a backward would be NaN."""
    return torch.where(mask, logprobs - old_logprobs.detach(), 0.0).clamp(max=MAX_LOG_RATIO)


def token_loss(terms: Tensor, log_ratio: Tensor, is_clipped: Tensor, mask: Tensor) -> TokenLoss:
    """Sets what is not trained to 0."""
    ratio = torch.exp(log_ratio.detach())
    return TokenLoss(
        terms=torch.where(mask, terms, 0.0), ratio=torch.where(mask, ratio, 0.0), is_clipped=is_clipped & mask
    )


def sequence_sums(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """[num_sequences] sums of the values, [N], of each sequence."""
    return values.new_zeros(num_sequences).index_add(0, sequence_index, values)


def sequence_means(values: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """[num_sequences] means over the tokens where the mask is True; 0 where a sequence has none."""
    total = sequence_sums(torch.where(mask, values, 0.0), sequence_index, num_sequences)
    return total / sequence_sums(mask.to(total.dtype), sequence_index, num_sequences).clamp(min=1)
