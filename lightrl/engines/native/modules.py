"""The forward of any transformers model with its own modules, and attention and masks made for the row cache.

Both functions are registered under one name, which is set as the model's attention implementation. Rows decode at
different positions, so the mask function takes the query offset as a tensor with one value per row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lightrl.engines.native.cache import RowCache, cache_name
from lightrl.models.multimodal import decoder_inputs, join_vision
from lightrl.records import EncodedPrompt

NATIVE_ATTENTION = "lightrl_native"
# Attention sinks and learned position biases are rare enough to be left to the model's own eager function.
_CHANGES_SCORES = frozenset({"s_aux", "position_bias"})


class ModuleForward:
    """Runs prompts, or one token per row, with the model's own modules and the rows of a cache."""

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel) -> None:
        """Takes the `decoder`, the part of the model that attends through the cache, perhaps the whole model."""
        AttentionInterface.register(NATIVE_ATTENTION, native_attention)
        AttentionMaskInterface.register(NATIVE_ATTENTION, native_mask)
        decoder.set_attn_implementation(NATIVE_ATTENTION)
        self._model, self._decoder = model, decoder
        self._cache_name = cache_name(model.forward)
        attentions: list[Any] = [item for item in decoder.modules() if type(item).__name__ == "Llama4TextAttention"]
        self._scaled = [module for module in attentions if module.attn_temperature_tuning and not module.use_rope]

    def prefill(self, ids: Tensor, last: Tensor, cache: RowCache) -> Tensor:
        """Returns logits [b, vocab] after index last[j] of each row of ids [b, t]; the prefill phase must be begun."""
        num_prompts, width = ids.shape
        positions = torch.arange(width, device=ids.device).expand(num_prompts, -1)
        with self._head_sees_only(last, width):
            logits = self._run(ids, positions, cache)
        if logits.shape[1] == 1:
            return logits[:, 0]
        return logits[torch.arange(num_prompts, device=ids.device), last]

    def prefill_with_images(
        self, ids: Tensor, last: Tensor, encoded: Sequence[EncodedPrompt], cache: RowCache
    ) -> Tensor:
        """Runs prompts of a vision-language model; otherwise the same as prefill()."""
        num_prompts, width = ids.shape
        positions = torch.zeros(3, num_prompts, width, dtype=torch.int64)
        for row, prompt in enumerate(encoded):
            positions[:, row, : len(prompt.token_ids)] = prompt.positions
        vision = join_vision(encoded, range(0, num_prompts * width, width))
        inputs = decoder_inputs(self._model, ids, vision.to(ids.device) if vision else None)
        positions = positions.to(ids.device)
        inputs[cache_name(self._decoder.forward)] = cache
        hidden: Tensor = self._decoder(position_ids=positions, use_cache=True, **inputs)[0]
        logits: Tensor = self._model.get_output_embeddings()(hidden[torch.arange(num_prompts, device=ids.device), last])
        return logits

    def decode(self, tokens: Tensor, positions: Tensor, cache: RowCache, rope_deltas: Tensor | None = None) -> Tensor:
        """Returns logits [n, vocab] of tokens [n] at positions [n]; the decode phase must be begun."""
        rope = positions if rope_deltas is None else (positions + rope_deltas).expand(3, -1)
        with self._scaled_by_row(positions):
            return self._run(tokens[:, None], rope[..., None], cache)[:, -1]

    def _run(self, ids: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        held = {self._cache_name: cache}
        output = self._model(input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, **held)
        logits: Tensor = output.logits
        return logits

    @contextmanager
    def _head_sees_only(self, last: Tensor, width: int) -> Iterator[None]:
        """Makes the output head score only the last token of each prompt, whatever follows the head in the model."""
        head = self._model.get_output_embeddings()
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

    @contextmanager
    def _scaled_by_row(self, positions: Tensor) -> Iterator[None]:
        """Scales the queries of Llama 4 by the positions of their own rows, [n]; it would take one for all of them."""
        handles = []
        for layer in self._scaled:
            scales = torch.log1p(torch.floor((positions.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
            handles.append(layer.q_proj.register_forward_hook(partial(_scale_rows, scales[:, None, None])))
            layer.attn_temperature_tuning = False
        try:
            yield
        finally:
            for layer, handle in zip(self._scaled, handles, strict=True):
                layer.attn_temperature_tuning = True
                handle.remove()


def _scale_rows(scales: Tensor, module: nn.Module, inputs: tuple[Any, ...], queries: Tensor) -> Tensor:
    return (queries * scales).to(queries.dtype)


def native_attention(
    module: nn.Module,
    query: Tensor,  # [b, heads, t, dim]
    key: Tensor,  # [b, kv_heads, positions, dim]
    value: Tensor,
    attention_mask: Tensor | None,  # additive, [b or 1, 1, t, positions]
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns the attention [b, t, heads, dim] of prompts, or of one token per row."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if any(value is not None for name, value in kwargs.items() if name in _CHANGES_SCORES):
        return _model_own_attention(module, query, key, value, attention_mask, scaling, softcap=softcap, **kwargs)
    if query.shape[2] == 1:
        return decode_attention(query, key, value, attention_mask, scaling, softcap), None
    if softcap is not None:
        return _model_own_attention(module, query, key, value, attention_mask, scaling, softcap=softcap, **kwargs)
    output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    return output


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attends with one query per row in two batched products over kv heads; a group shares its keys uncopied."""
    rows, num_heads, _, dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.reshape(rows * num_kv_heads, num_heads // num_kv_heads, dim)
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(rows, num_kv_heads, -1, key.shape[2])
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    mixed = torch.bmm(weights.flatten(0, 1), value.flatten(0, 1))
    return mixed.view(rows, 1, num_heads, value.shape[3])


# The function that transformers' models fall back on has no public name:
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py
# This can go when AttentionInterface lists it as "eager" for every model (5.19: not yet).
def _model_own_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    eager: Callable[..., tuple[Tensor, Tensor | None]] | None = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )
    if eager is None:
        raise RuntimeError(
            f"{type(module).__name__} passes {sorted(kwargs)} to its attention, and its module has no"
            " eager_attention_forward to fall back on. Use another engine for this model."
        )
    if mask is None and query.shape[2] > 1:  # the mask function has left the causal rule to the kernel
        mask = torch.full((query.shape[2], key.shape[2]), float("-inf"), dtype=query.dtype, device=query.device)
        mask = mask.triu(1)[None, None]
    return eager(module, query, key, value, mask, scaling=scaling, **kwargs)


def native_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Tensor],
    dtype: torch.dtype = torch.float32,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device,
    **kwargs: Any,
) -> Tensor | None:
    """Returns the additive mask [b or 1, 1, q, kv] of a rule over (row, head, query position, key position).

    It is None for a prompt under the plain causal rule, which the kernel applies itself. Padding needs no mask, since
    it is to the right of every token that counts.

    transformers' own mask functions take one query offset for all rows. This one can go when theirs take a tensor:
    https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/masking_utils.py (5.19: not yet).
    """
    is_prompt = not isinstance(q_offset, Tensor)
    fits_window = local_size is None or q_length <= local_size
    if is_prompt and allow_is_causal_skip and fits_window:
        return None
    offset = torch.as_tensor(q_offset, device=device).view(-1, 1, 1, 1)
    rows = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    queries = offset + torch.arange(q_length, device=device).view(1, 1, -1, 1)
    keys = (kv_offset + torch.arange(kv_length, device=device)).view(1, 1, 1, -1)
    if use_vmap:  # the rule indexes tensors, so it takes one (row, head, query, key) at a time
        flat = torch.broadcast_tensors(rows, heads, queries, keys)
        allowed = torch.vmap(mask_function)(*(axis.flatten() for axis in flat)).view(flat[0].shape)
    else:
        allowed = mask_function(rows, heads, queries, keys)
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.where(allowed, zero, torch.finfo(dtype).min)
