"""From a term per token to one number. The weights decide which mean it is; the denominator is global in all of them.

An aggregation is `fn(mask, sequence_index, num_sequences, **parameters) -> TokenWeights`. With `weights` per token and
`total` per micro-batch, the loss of an update is sum(weights * terms) / sum(total), both sums over all micro-batches
and ranks. So a micro-batch's loss is `mean_loss(terms, weights)`, its weight in train_batch is `total`, and neither
the micro-batch size, nor the packing, nor the number of ranks changes the gradient.

A sequence without a trained token counts nowhere. Tokens that a correction rejects do count: their terms are weighed
by 0, the mask is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_bool_mask, require_same_shape, require_sequence_index
from lightrl.algorithms.tokens import sequence_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """How the tokens of one micro-batch count."""

    weights: Tensor  # [N] float32, 0 where nothing is trained
    total: Tensor  # [] float32, this micro-batch's share of the denominator


def token_mean(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> TokenWeights:
    """Every trained token counts the same (DAPO, arXiv:2503.14476, eq. 8)."""
    _check(mask, sequence_index, num_sequences)
    weights = mask.float()
    return TokenWeights(weights=weights, total=weights.sum())


def sequence_mean(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> TokenWeights:
    """The mean over sequences of their means over tokens (GRPO, arXiv:2402.03300, eq. 3)."""
    counts = _trained_tokens(mask, sequence_index, num_sequences)
    weights = mask.float() / counts.clamp(min=1)[sequence_index]
    return TokenWeights(weights=weights, total=(counts > 0).float().sum())


def sequence_mean_token_sum(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> TokenWeights:
    """The mean over sequences of their sums over tokens: the policy gradient of a whole response."""
    return sequence_mean_token_sum_norm(mask, sequence_index, num_sequences, length=1)


def sequence_mean_token_sum_norm(
    mask: Tensor, sequence_index: Tensor, num_sequences: int, *, length: float
) -> TokenWeights:
    """The mean over sequences of their sums over tokens, over one constant length (Dr. GRPO, arXiv:2503.20783).

    Args:
        length: the same for a whole run, such as the longest response allowed.
    """
    if length <= 0:
        raise ValueError(f"length is {length}: it is a number of tokens, such as the longest response allowed.")
    counts = _trained_tokens(mask, sequence_index, num_sequences)
    return TokenWeights(weights=mask.float() / length, total=(counts > 0).float().sum())


def mean_loss(terms: Tensor, token_weights: TokenWeights) -> Tensor:
    """The micro-batch's loss; 0 with a gradient of 0 that flows where nothing is trained.

    To combine several (policy, KL, entropy), add their terms first.
    """
    require_same_shape(terms=terms, weights=token_weights.weights)
    weights, total = token_weights.weights, token_weights.total
    # Where the weight is 0 the term is not read: 0 * inf would be NaN.
    weighed = torch.where(weights > 0, terms, 0.0) * weights
    return weighed.sum() / torch.where(total > 0, total, 1.0)


def _trained_tokens(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    _check(mask, sequence_index, num_sequences)
    return sequence_sums(mask.float(), sequence_index, num_sequences)


def _check(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> None:
    require_bool_mask(mask)
    require_sequence_index(sequence_index, mask, num_sequences)
