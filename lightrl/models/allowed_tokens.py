"""The tokens that top-p and top-k left to draw from: the support of the distribution that a token came from.

A truncated distribution is the full one, renormalised over its support. The weights that sampled decided which tokens
belong to the support. An update must compute both of its probabilities on that support; otherwise their ratio would
compare two different sets (DeepSeek-V3.2, arXiv:2512.02556, calls this keeping the sampling mask).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.models.logprobs import LOWEST


class AllowedTokens:
    """Hides the tokens that a row could not have drawn from tiles of logits."""

    def __init__(self, pairs: Tensor, num_rows: int) -> None:
        """Takes pairs of a row and a token that it could draw, [m, 2] int; a row without pairs could draw any token."""
        self._rows, self._tokens = pairs.long().unbind(1)
        self._is_limited = torch.zeros(num_rows, dtype=torch.bool, device=pairs.device)
        self._is_limited[self._rows] = True

    def hide_others(self, logits: Tensor, rows: slice, columns: slice) -> Tensor:
        """Overwrites the logits [rows, columns] of the tokens that are not allowed, and returns them."""
        in_rows = (self._rows >= rows.start) & (self._rows < rows.stop)
        inside = in_rows & (self._tokens >= columns.start) & (self._tokens < columns.stop)
        is_hidden = self._is_limited[rows, None].repeat(1, logits.shape[1])
        is_hidden[self._rows[inside] - rows.start, self._tokens[inside] - columns.start] = False
        return logits.masked_fill_(is_hidden, LOWEST)
