"""The native engine of a run with `--exact`: its logprobs equal the trainer's, bit for bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrl.engines.native.cache import RowCache, cache_name
from lightrl.engines.native.engine import NativeEngine, build_native_engine
from lightrl.engines.native.forward import FusedForward, ModelRunner, RMSNorm, SampleState
from lightrl.engines.native.forward_check import last_logits
from lightrl.engines.native.modules import ModuleForward
from lightrl.engines.native.own_cache import SampleCaches
from lightrl.engines.native.products import FusedLinear
from lightrl.engines.native.sampler import SamplingPlan, keep_allowed, sample
from lightrl.engines.native.truncated import TruncatedEngine
from lightrl.exact.attention import ENGINE_ATTENTION, LEAST_KEYS, attend, attend_causally
from lightrl.exact.environment import linear
from lightrl.models.logprobs import final_logits, logprobs_of_logits
from lightrl.models.policy import logit_scale, softcap_of

logger = logging.getLogger(__name__)

_COMPARED_LENGTHS = (7, 50)  # lengths of sequences on which the fused forward must give the modules' bits


class ExactCache(RowCache):
    """Row storage of which a decode step reads at least LEAST_KEYS positions."""

    least_read = LEAST_KEYS

    def reserve(self, rows: int, positions: int, most_rows: int, most_positions: int) -> None:
        """Grows the storage to hold rows x positions."""
        super().reserve(rows, max(positions, LEAST_KEYS), most_rows, max(most_positions, LEAST_KEYS))


class ExactModules(ModuleForward):
    """Runs the model's own modules, as in the trainer, with the attention and the head of lightrl/exact."""

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel) -> None:
        super().__init__(model, decoder)
        decoder.set_attn_implementation(ENGINE_ATTENTION)
        config = model.config.get_text_config()
        self._decoder_takes = cache_name(model.get_decoder().forward)
        self._scale, self._softcap = logit_scale(config, model.config.model_type), softcap_of(config)

    def prefill(self, ids: Tensor, last: Tensor, cache: RowCache) -> Tensor:
        """Returns logits [b, vocab] after index last[j] of each row of ids [b, t]; the prefill phase must be begun."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
        hidden = self._hidden(ids, positions, cache)
        return self._logits(hidden[torch.arange(ids.shape[0], device=ids.device), last])

    def decode(self, tokens: Tensor, positions: Tensor, cache: RowCache, rope_deltas: Tensor | None = None) -> Tensor:
        """Returns logits [n, vocab] of tokens [n] at positions [n]; the decode phase must be begun."""
        return self._logits(self._hidden(tokens[:, None], positions[:, None], cache)[:, -1])

    def _hidden(self, ids: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        decoder: Any = self._model.get_decoder()
        held = {self._decoder_takes: cache}
        hidden: Tensor = decoder(input_ids=ids, position_ids=positions, use_cache=True, **held)[0]
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        head: Any = self._model.get_output_embeddings()
        product = linear(hidden, head.weight, getattr(head, "bias", None))
        return final_logits(product, self._scale, self._softcap)


class ExactLinear(FusedLinear):
    """Linear layers of one input as one product; the bits of a row do not depend on the number of rows."""

    def __call__(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight.t(), self.bias)

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Adds the product to hidden states after rounding it, as the modules do."""
        hidden.add_(self(inputs))


class ExactForward(FusedForward):
    """The fused forward, with every number rounded where the model's modules round it."""

    make_linear = ExactLinear

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.score = self._score  # whether the head's weight is packed or not
        for part in self.parts():
            if isinstance(part, RMSNorm):
                part.by_parts = False
                part.refresh()

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return attend(queries, keys, values, mask, self.scaling)

    def mix_prompts(self, layer: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        return attend_causally(queries, keys, values, self.scaling, layer.window)

    def _score(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._head.weight)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # addcmul rounds once, but the modules round twice.
        rotated = (heads * cos).add_(heads.roll(self.dim // 2, -1).mul_(sin))
        queries, keys = rotated.split_with_sizes((self.num_heads, self.num_kv_heads), 1)
        return queries, keys


class ExactRunner(ModelRunner):
    """Runs the fused forward if it was found to give the modules' bits, and the modules otherwise."""

    trusts_tests = False
    replays_steps = False
    make_cache = ExactCache
    make_modules = ExactModules
    make_fused = ExactForward

    def verify(self, vocab_size: int, cache: SampleState) -> SampleState:
        """Compares the forward with the plain model, and a fused forward with the modules, bit for bit."""
        is_new = self._verified is None
        cache = super().verify(vocab_size, cache)
        if isinstance(cache, SampleCaches):
            raise ValueError(
                f"--exact True does not go with {type(self.model).__name__}, which keeps a state of its own: the "
                "trainer computes it in another way. Use a model with attention alone, or leave --exact out."
            )
        if is_new and self.uses_fused_forward:
            sequences = [[(7 * index + 1) % vocab_size for index in range(length)] for length in _COMPARED_LENGTHS]
            fused, modules = (
                last_logits(forward, sequences, self.make_cache(), self.device)
                for forward in (cast("FusedForward", self._fused), self._through_modules())
            )
            if not torch.equal(fused, modules):
                logger.warning("The fused forward of %s rounds in another way: not used.", type(self.model).__name__)
                self._verified, self._fused = self._modules, None
        return cache


def draw_exactly(logits: Tensor, uniforms: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
    """Returns tokens and logprobs like sample(), but logprobs with the bits of chosen_logprobs() with LogitSteps."""
    scores = logits if plan.temperature is None else logits / plan.temperature
    if plan.filters is not None:
        scores = keep_allowed(scores, plan.filters)
    tokens, _ = sample(scores, uniforms, replace(plan, temperature=None, filters=None))
    return tokens, logprobs_of_logits(scores, tokens)


class ExactEngine(NativeEngine):
    """Generates with the trainer's arithmetic."""

    make_runner = ExactRunner
    draw = staticmethod(draw_exactly)


class ExactTruncatedEngine(TruncatedEngine, ExactEngine):
    """Generates with the trainer's arithmetic, and reports the tokens that were left to draw from."""


build_exact_engine = partial(build_native_engine, kind=ExactEngine)
build_exact_truncated_engine = partial(build_native_engine, kind=ExactTruncatedEngine)
