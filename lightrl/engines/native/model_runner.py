"""Runs a transformers causal LM over the row cache: whole prompts, then one token a row. Any architecture.

It goes through the model's own modules unless fused_forward.py knows the family; what either computes is compared with
the plain model once, before the first token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl.engines.native.attention import NATIVE_ATTENTION, register
from lightrl.engines.native.fused_forward import FusedForward
from lightrl.engines.native.kv_cache import SlotCache
from lightrl.models.multimodal import FAMILIES, decoder_inputs, join_vision
from lightrl.records import EncodedPrompt

logger = logging.getLogger(__name__)

_PROBE_LENGTHS = (3, 6)  # prompts of the comparison: two, so that rows decode at different positions
_PROBE_STEPS = 2


class ModelRunner:
    """Logits from a model and the cache."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        register()
        self.model = model
        # A vision tower attends to whole images, without a cache: it keeps its own attention.
        self._caching: PreTrainedModel = model.get_decoder() if model.config.model_type in FAMILIES else model
        self._caching.set_attn_implementation(NATIVE_ATTENTION)
        self.device = device
        self.prefill_tokens = 0  # prompt tokens run so far, padding left out
        self._fused = FusedForward.build(model)
        self._is_verified = False
        self._uses_fused = False

    @property
    def uses_fused_forward(self) -> bool:
        return self._uses_fused

    def refresh(self) -> None:
        """To be called after the weights changed."""
        if self._fused is not None:
            self._fused.refresh()

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        target_rows: Tensor,
        source_prompts: Tensor,
        cache: SlotCache,
        encoded: Sequence[EncodedPrompt] | None = None,
    ) -> Tensor:
        """Runs the prompts, padded on the right, into rows of the cache; logits after each prompt, [prompts, vocab].

        encoded: the prompts as a vision-language model takes them.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        self.prefill_tokens += int(lengths.sum())
        last = (lengths - 1).to(self.device)
        positions = torch.arange(width, device=self.device).expand(len(prompts), -1)
        cache.begin_prefill(target_rows, source_prompts)
        if self._uses_fused:
            assert self._fused is not None
            return self._fused.prefill(ids.to(self.device), last, cache)
        if encoded is not None:
            return self._prefill_with_images(ids.to(self.device), last, encoded, cache)
        with self._head_sees_only(last, width):
            logits = self._forward(ids.to(self.device), positions, cache)
        if logits.shape[1] == 1:
            return logits[:, 0]
        return logits[torch.arange(len(prompts), device=self.device), last]

    def _prefill_with_images(
        self, ids: Tensor, last: Tensor, encoded: Sequence[EncodedPrompt], cache: SlotCache
    ) -> Tensor:
        num_prompts, width = ids.shape
        positions = torch.zeros(3, num_prompts, width, dtype=torch.int64)
        for row, prompt in enumerate(encoded):
            positions[:, row, : len(prompt.token_ids)] = prompt.positions
        vision = join_vision(encoded, range(0, num_prompts * width, width))
        inputs = decoder_inputs(self.model, ids, vision.to(self.device) if vision else None)
        hidden: Tensor = self._caching(
            position_ids=positions.to(self.device), past_key_values=cache, use_cache=True, **inputs
        )[0]
        logits: Tensor = self.model.get_output_embeddings()(hidden[torch.arange(num_prompts, device=self.device), last])
        return logits

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        lowest: int,
        highest: int,
        cache: SlotCache,
        rope_deltas: Tensor | None = None,
    ) -> Tensor:
        """Runs one token in each of the first n rows, [n] int64 each; logits [n, vocab].

        lowest and highest are those of the positions, which are places in the cache.
        rope_deltas: [n], of a vision-language model: what its own positions are beyond these.
        """
        cache.begin_decode(positions, lowest, highest)
        if self._uses_fused:
            assert self._fused is not None
            return self._fused.decode(tokens, positions, cache)
        rope = positions if rope_deltas is None else (positions + rope_deltas).expand(3, -1)
        return self._forward(tokens[:, None], rope[..., None], cache)[:, -1]

    def verify(self, vocab_size: int) -> None:
        """Compares prefill and decoding with the plain model on a few tokens, once weights are there to compare with.

        A fused forward that differs is dropped; a model that the cache cannot drive is refused.
        """
        if self._is_verified:
            return
        sequences = [
            [(7 * place + 3 * row + 1) % vocab_size for place in range(length + _PROBE_STEPS)]
            for row, length in enumerate(_PROBE_LENGTHS)
        ]
        try:
            expected = torch.stack([self._plain_logits(sequence) for sequence in sequences])
            if not expected.isfinite().all() or expected.amin() == expected.amax():
                return  # weights not loaded yet: nothing to compare
            through_modules = self._probe(sequences, fused=False)
        except Exception as error:
            raise RuntimeError(f"{self._describe()} ({type(error).__name__}: {error})") from error
        if not self._agrees(through_modules, expected):
            if expected.dtype != torch.float32:
                logger.warning("%s", self._describe())
            else:
                raise RuntimeError(self._describe())
        if self._fused is not None and not self._agrees(self._probe(sequences, fused=True), expected):
            logger.warning("The fused forward of %s differs from the model: not used.", type(self.model).__name__)
            self._fused = None
        self._is_verified, self._uses_fused = True, self._fused is not None

    def _describe(self) -> str:
        return (
            f"The native engine's row cache does not reproduce the logits of {type(self.model).__name__}."
            " It needs softmax attention through transformers' AttentionInterface. Use --engine vllm or sglang."
        )

    def _agrees(self, got: Tensor, expected: Tensor) -> bool:
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 5e-2
        scale = expected.abs().amax().clamp_min(1e-6)
        return bool(((got - expected).abs().amax() <= tolerance * scale).item())

    def _plain_logits(self, sequence: list[int]) -> Tensor:
        """The last _PROBE_STEPS + 1 rows of the model's logits without a cache, by its eager attention."""
        self._caching.set_attn_implementation("eager")
        try:
            ids = torch.tensor([sequence], device=self.device)
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        finally:
            self._caching.set_attn_implementation(NATIVE_ATTENTION)
        return logits[0, -_PROBE_STEPS - 1 :].float()

    def _probe(self, sequences: list[list[int]], fused: bool) -> Tensor:
        cache = SlotCache()
        num_rows, longest = len(sequences), max(len(sequence) for sequence in sequences)
        cache.reserve(num_rows, longest, num_rows, longest)
        rows = torch.arange(num_rows, device=self.device)
        tokens_before, self._uses_fused = self.prefill_tokens, fused
        try:
            steps = [self.prefill([s[:-_PROBE_STEPS] for s in sequences], rows, rows, cache)]
            for step in range(_PROBE_STEPS):
                places = [len(sequence) - _PROBE_STEPS + step for sequence in sequences]
                tokens = torch.tensor(
                    [s[place] for s, place in zip(sequences, places, strict=True)], device=self.device
                )
                positions = torch.tensor(places, device=self.device)
                steps.append(self.decode(tokens, positions, min(places), max(places), cache))
        finally:
            self.prefill_tokens, self._uses_fused = tokens_before, False
        return torch.stack(steps, dim=1).float()

    def _forward(self, ids: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        logits: Tensor = self.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, return_dict=True
        ).logits
        return logits

    @contextmanager
    def _head_sees_only(self, last: Tensor, width: int) -> Iterator[None]:
        """Lets the output head score only the last token of each prompt, whatever follows the head in the model."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            yield
            return

        def keep_last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden = inputs[0]
            rows = torch.arange(last.shape[0], device=hidden.device)
            return (hidden[rows, last][:, None], *inputs[1:]) if hidden.shape[:2] == (len(rows), width) else inputs

        handle = head.register_forward_pre_hook(keep_last)
        try:
            yield
        finally:
            handle.remove()
