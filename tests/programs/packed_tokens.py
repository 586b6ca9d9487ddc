"""Makes packed tokens with given probability ratios, for the tests of losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightrl.algorithms.losses import PolicyTokens, TokenLoss


def sequence_index_of(lengths: Sequence[int]) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def tokens_at(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    old: float = 0.5,
    lengths: Sequence[int] | None = None,
    mask: Sequence[bool] | None = None,
    selected: Sequence[bool] | None = None,
) -> PolicyTokens:
    """Tokens of old probability `old` and new probability ratio x old, in double precision; one sequence by default."""
    lengths = [len(ratios)] if lengths is None else lengths
    old_logprobs = torch.full((len(ratios),), old, dtype=torch.float64).log()
    return PolicyTokens(
        logprobs=old_logprobs + torch.tensor(ratios, dtype=torch.float64).log(),
        old_logprobs=old_logprobs,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.tensor([True] * len(ratios) if mask is None else mask, dtype=torch.bool),
        sequence_index=sequence_index_of(lengths),
        num_sequences=len(lengths),
        selected=None if selected is None else torch.tensor(selected, dtype=torch.bool),
    )


def gradient_of(loss: Callable[..., TokenLoss], tokens: PolicyTokens, **parameters: object) -> Tensor:
    """The gradient of the sum of the terms by the log probabilities."""
    leaf = tokens.logprobs.detach().clone().requires_grad_()
    loss(dataclasses.replace(tokens, logprobs=leaf), **parameters).terms.sum().backward()
    assert leaf.grad is not None
    return leaf.grad
