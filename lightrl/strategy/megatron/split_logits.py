"""Logits for a user's loss function when ranks split the vocabulary, gathered for a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from lightrl.models.lazy_logits import Head, Logits


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitHead(Head):
    """An output layer whose rows are split over the ranks."""

    vocab_size: int

    @property
    def num_logits(self) -> int:
        """Size of the vocabulary."""
        return self.vocab_size

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the logits of a few rows in float32; each rank gets the gradient of its own columns."""
        from megatron.core.tensor_parallel import mappings

        own = F.linear(hidden, weight).float()
        whole: Tensor = mappings.gather_from_tensor_model_parallel_region(own)
        return whole[:, : self.vocab_size]  # without the padding of the last rank


def logits_of(states: Tensor, weight: Tensor, vocab_size: int, num_parts: int) -> Logits:
    """Returns the logits of states, [T, V], from this rank's rows of the output layer."""
    states = states.to(weight.dtype)
    if num_parts == 1:
        return Logits(hidden=states, head=Head(weight=weight[:vocab_size], bias=None, softcap=None, scale=1.0))
    head = SplitHead(weight=weight, bias=None, softcap=None, scale=1.0, vocab_size=vocab_size)
    return Logits(hidden=states, head=head, change=lambda rows, _: rows)  # no shortcut that reads only the weight
