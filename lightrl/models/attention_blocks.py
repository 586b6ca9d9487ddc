"""Attention of long sequences in blocks of queries, so that no matrix of all pairs of tokens is ever built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_FEWEST_QUERIES = 128  # of a block, however small the window is
_MOST_QUERIES = 512  # of a block whose scores are kept in memory


class Windowed(Protocol):
    """The settings of the scores, of which only the window matters here."""

    @property
    def window(self) -> int | None:
        """How many tokens a token sees, itself included; None: all before it."""


# Takes queries, keys and values, [n, heads, tokens, dim], and settings; the queries are those of the last keys.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def in_windows(attend: Attend, query: Tensor, key: Tensor, value: Tensor, scoring: Windowed) -> Tensor:
    """Computes attention in one call of `attend`, in which each block of queries has its own and the previous keys.

    With a mask of the whole sequence, memory and time would grow with the square of its length.
    """
    assert scoring.window is not None
    num_sequences, length = query.shape[0], query.shape[2]
    size = max(scoring.window, _FEWEST_QUERIES)
    if length <= 2 * size:
        return attend(query, key, value, scoring)
    first = attend(query[:, :, :size], key[:, :, :size], value[:, :, :size], scoring)
    # The padding comes after all queries, which therefore do not see it.
    padded = (F.pad(part, (0, 0, 0, -length % size)).unflatten(2, (-1, size)) for part in (query, key, value))
    queries, keys, values = padded  # [num_sequences, heads, blocks, size, dim]
    keys, values = (torch.cat([part[:, :, :-1], part[:, :, 1:]], dim=3) for part in (keys, values))
    folded = [part.transpose(1, 2).flatten(0, 1) for part in (queries[:, :, 1:], keys, values)]
    others = attend(folded[0], folded[1], folded[2], scoring)
    others = others.unflatten(0, (num_sequences, -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, others[:, :, : length - size]], dim=2)


def in_turn(attend: Attend, query: Tensor, key: Tensor, value: Tensor, scoring: Windowed) -> Tensor:
    """Computes attention one block of queries after the other, for an `attend` that keeps the scores in memory.

    The backward computes the scores of a block again.
    """
    if query.shape[2] <= 2 * _MOST_QUERIES:
        return attend(query, key, value, scoring)
    outputs, end = [], 0
    for block in query.split(_MOST_QUERIES, dim=2):
        start, end = end, end + block.shape[2]
        first = 0 if scoring.window is None else max(0, start + 1 - scoring.window)
        inputs = (block, key[:, :, first:end], value[:, :, first:end], scoring)
        outputs.append(_computed_again(attend, *inputs) if torch.is_grad_enabled() else attend(*inputs))
    return torch.cat(outputs, dim=2)


def _computed_again(attend: Attend, *inputs: Any) -> Tensor:
    output: Tensor = checkpoint(attend, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output
