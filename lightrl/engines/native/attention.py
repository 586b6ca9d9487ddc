"""The attention and mask functions that transformers calls when the native engine drives a model.

Registered under one name, which the engine sets as the model's attention implementation. Rows decode at different
positions: the mask function takes the query offset as a tensor, one value a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NATIVE_ATTENTION = "lightrl_native"


def native_attention(
    module: nn.Module,
    query: Tensor,  # [b, heads, t, dim]
    key: Tensor,  # [b, kv_heads, places, dim]
    value: Tensor,
    attention_mask: Tensor | None,  # additive, [b or 1, 1, t, places]
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a prompt or of one token a row; returns [b, t, heads, dim]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if any(value is not None for name, value in kwargs.items() if name in _CHANGES_SCORES):
        return _model_own_attention(module, query, key, value, attention_mask, scaling, softcap=softcap, **kwargs)
    if query.shape[2] == 1:
        return decode_attention(query, key, value, attention_mask, scaling, softcap), None
    if softcap is not None:
        return _model_own_attention(module, query, key, value, attention_mask, scaling, softcap=softcap, **kwargs)
    output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    return output


# Attention sinks and learned position biases: rare enough to be left to the model's own eager function.
_CHANGES_SCORES = frozenset({"s_aux", "position_bias"})


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """One query a row as two batched products over kv heads: the heads of a group share keys that are never copied."""
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
    if mask is None and query.shape[2] > 1:  # the mask function left the causal rule to the kernel
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
    """The additive mask [b or 1, 1, q, kv] of a rule over (row, head, query position, key position).

    None for a prompt under the plain causal rule, which the kernel applies by itself. Padding needs no mask: it lies to
    the right of every token that counts.
    """
    is_prompt = not isinstance(q_offset, Tensor)
    fits_window = local_size is None or q_length <= local_size
    if is_prompt and allow_is_causal_skip and fits_window:
        return None
    offset = torch.as_tensor(q_offset, device=device).view(-1, 1, 1, 1)
    rows = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    queries = offset + torch.arange(q_length, device=device).view(1, 1, -1, 1)
    places = (kv_offset + torch.arange(kv_length, device=device)).view(1, 1, 1, -1)
    if use_vmap:  # the rule indexes tensors, so it takes one (row, head, query, key) at a time
        flat = torch.broadcast_tensors(rows, heads, queries, places)
        allowed = torch.vmap(mask_function)(*(axis.flatten() for axis in flat)).view(flat[0].shape)
    else:
        allowed = mask_function(rows, heads, queries, places)
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.where(allowed, zero, torch.finfo(dtype).min)


def register() -> None:
    """Makes NATIVE_ATTENTION known to transformers."""
    AttentionInterface.register(NATIVE_ATTENTION, native_attention)
    AttentionMaskInterface.register(NATIVE_ATTENTION, native_mask)
