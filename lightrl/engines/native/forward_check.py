"""Compares forwards with the plain model on a few tokens: a model may compute what a fast forward leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

_PROMPT_LENGTHS = (3, 6)  # two, so that rows decode at different positions
_NUM_STEPS = 2  # single tokens after each prompt


class Forward(Protocol):
    """A way to compute logits: FusedForward, ModuleForward or OwnCacheForward, each with its own kind of cache."""

    def prefill(self, ids: Tensor, last: Tensor, cache: Any) -> Tensor: ...

    def decode(self, tokens: Tensor, positions: Tensor, cache: Any, rope_deltas: Tensor | None = None) -> Tensor: ...


class ForwardCheck:
    """The plain model's logits for a few tokens, with which those of a forward must agree."""

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel, vocab_size: int) -> None:
        """Runs the model with the eager attention of its decoder, without a cache."""
        self._model = model
        self._sequences = [
            [(7 * index + 3 * row + 1) % vocab_size for index in range(length + _NUM_STEPS)]
            for row, length in enumerate(_PROMPT_LENGTHS)
        ]
        usual = decoder.config._attn_implementation
        try:
            decoder.set_attn_implementation("eager")
            self._expected = self._plain_logits()
        except Exception as error:  # models fail in many ways
            raise RuntimeError(f"{self.objection()} ({type(error).__name__}: {error})") from error
        finally:
            decoder.set_attn_implementation(usual)

    @property
    def has_weights(self) -> bool:
        """Whether the model has weights that tell a right forward from a wrong one."""
        return bool(self._expected.isfinite().all()) and bool(self._expected.amin() != self._expected.amax())

    def agrees(self, forward: Forward, cache: Any) -> bool:
        """Returns whether a forward with an empty cache computes the model's logits, up to rounding."""
        tolerance = 1e-3 if self._model.dtype == torch.float32 else 5e-2
        scale = self._expected.abs().amax().clamp_min(1e-6)
        gap = (last_logits(forward, self._sequences, cache, self._model.device) - self._expected).abs().amax()
        return bool(gap <= tolerance * scale)

    def objection(self) -> str:
        """Returns the message for a model that no forward reproduces."""
        return (
            f"The native engine does not reproduce the logits of {type(self._model).__name__}, with or without a cache:"
            " they depend on later tokens, or on chance. Use --engine vllm or sglang."
        )

    def _plain_logits(self) -> Tensor:
        """Returns the last _NUM_STEPS + 1 logits of each sequence."""
        ids = [torch.tensor([sequence], device=self._model.device) for sequence in self._sequences]
        logits = [self._model(input_ids=part, use_cache=False).logits[0, -_NUM_STEPS - 1 :] for part in ids]
        return torch.stack(logits).float()


def last_logits(forward: Forward, sequences: Sequence[Sequence[int]], cache: Any, device: torch.device) -> Tensor:
    """Returns a forward's logits of the last _NUM_STEPS + 1 tokens of each sequence: a prefill, then single tokens."""
    num_rows, longest = len(sequences), max(map(len, sequences))
    cache.reserve(num_rows, longest, num_rows, longest)
    rows = torch.arange(num_rows, device=device)
    cache.begin_prefill(rows, rows)
    prompts = [torch.tensor(sequence[:-_NUM_STEPS]) for sequence in sequences]
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    steps = [forward.prefill(pad_sequence(prompts, batch_first=True).to(device), last, cache)]
    for step in range(-_NUM_STEPS, 0):
        places = [len(sequence) + step for sequence in sequences]
        tokens = torch.tensor([sequence[step] for sequence in sequences], device=device)
        positions = torch.tensor(places, device=device)
        cache.begin_decode(positions, min(places), max(places))
        steps.append(forward.decode(tokens, positions, cache))
    return torch.stack(steps, dim=1).float()
