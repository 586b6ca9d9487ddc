"""Attention whose bits are the same in the trainer and in the engine, for any pack, batch or padding.

With lightrl/exact/environment.py, a row of a matrix product does not depend on the other rows. Three rules keep
everything else equal. A product has at least LEAST_ROWS rows, because fewer rows are computed in a different way.
Softmax sees at least LEAST_KEYS keys, because fewer do not fill a vector. Keys are mixed KEY_BLOCK at a time, because
a longer sum is split depending on its length, and the engine pads the keys while the trainer does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from lightrl.engines.native.modules import native_mask
from lightrl.exact.environment import LEAST_ROWS
from lightrl.models.packed_attention import CURRENT_LAYOUT, LAYOUT_KEYWORD, packed_mask, runs_of

TRAINER_ATTENTION = "lightrl_exact_packed"
ENGINE_ATTENTION = "lightrl_exact_rows"
LEAST_KEYS = 32
KEY_BLOCK = 128
ROW_BLOCK = 128  # tokens of a sequence that attend together, to keys up to the last of them


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Returns softmax(queries @ keys * scaling + mask) @ values, [b, rows, dim].

    Args:
        queries: [b, rows, dim].
        keys: [b, dim, n] with n >= LEAST_KEYS; values are [b, n, dim].
        mask: [b or 1, rows or 1, n], 0 or -inf.
    """
    rows = queries.shape[1]
    if rows < LEAST_ROWS:
        missing = (0, 0, 0, LEAST_ROWS - rows)
        queries, mask = F.pad(queries, missing), F.pad(mask, missing) if mask.shape[1] > 1 else mask
    weights = torch.baddbmm(mask, queries, keys, alpha=scaling).softmax(-1)
    (first, first_values), *rest = zip(weights.split(KEY_BLOCK, dim=2), values.split(KEY_BLOCK, dim=1), strict=True)
    mixed = torch.bmm(first, first_values)
    for block, block_values in rest:
        mixed = torch.baddbmm(mixed, block, block_values)
    return mixed[:, :rows]


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None) -> Tensor:
    """Returns the attention of whole sequences, [b, t, heads, dim].

    Args:
        queries: [b, heads, t, dim]; keys and values [b, kv_heads, t, dim].
        window: a token sees itself and the window - 1 tokens before it; None: all tokens before it.
    """
    count, num_heads, length, dim = queries.shape
    num_kv_heads, padding = keys.shape[1], max(0, LEAST_KEYS - length)
    group = num_heads // num_kv_heads
    keys, values = (F.pad(part, (0, 0, 0, padding)).flatten(0, 1) for part in (keys, values))
    sees = torch.ones(length, length + padding, dtype=torch.bool, device=queries.device).tril()
    if window is not None:
        sees = sees.triu(1 - window)
    mask = torch.zeros(sees.shape, dtype=queries.dtype, device=queries.device).masked_fill_(~sees, float("-inf"))
    grouped = queries.reshape(count * num_kv_heads, group, length, dim)
    # Split and cat, because the backward of a slice fills a tensor of the full size.
    key_blocks, value_blocks = keys.split(ROW_BLOCK, dim=1), values.split(ROW_BLOCK, dim=1)
    outputs = []
    for index, rows in enumerate(grouped.split(ROW_BLOCK, dim=2)):
        seen_keys, seen_values = (torch.cat(blocks[: index + 1], dim=1) for blocks in (key_blocks, value_blocks))
        start, num_rows, num_keys = index * ROW_BLOCK, rows.shape[2], seen_keys.shape[1]
        block_mask = mask[start : start + num_rows, :num_keys].repeat(group, 1)[None]
        mixed = attend(rows.flatten(1, 2), seen_keys.transpose(1, 2), seen_values, block_mask, scaling)
        outputs.append(mixed.reshape(count, num_heads, num_rows, values.shape[2]))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each sequence of a pack; the trainer's layers call it through transformers."""
    layout = kwargs.get(LAYOUT_KEYWORD) or CURRENT_LAYOUT.get()
    if layout is None or _changes_scores(kwargs):
        raise _unsupported(module)
    window = attention_mask if sliding_window is None else sliding_window
    scaling = scaling or query.shape[-1] ** -0.5
    outputs = [
        attend_causally(q, k, v, scaling, window).flatten(0, 1) for q, k, v in runs_of(layout, query, key, value)
    ]
    return torch.cat(outputs)[None], None


def row_attention(
    module: nn.Module,
    query: Tensor,  # [b, heads, t, dim]
    key: Tensor,  # [b, kv_heads, positions, dim]
    value: Tensor,
    attention_mask: Tensor | None,  # additive, [b or 1, 1, t, positions]
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention of prompts, or of one token per row; the engine's layers call it through transformers."""
    if _changes_scores(kwargs):
        raise _unsupported(module)
    scaling = scaling or query.shape[-1] ** -0.5
    if query.shape[2] > 1 or attention_mask is None:
        return attend_causally(query, key, value, scaling, sliding_window), None
    rows, num_kv_heads = key.shape[:2]
    mask = attention_mask.expand(rows, num_kv_heads, 1, -1).flatten(0, 1)
    grouped = query.reshape(rows * num_kv_heads, -1, query.shape[3])
    mixed = attend(grouped, key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1), mask, scaling)
    return mixed.reshape(rows, 1, query.shape[1], -1), None


def _changes_scores(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")) or bool(
        kwargs.get("dropout")
    )


def _unsupported(module: nn.Module) -> ValueError:
    return ValueError(
        f"--exact True does not go with {type(module).__name__}, whose attention caps or adds to its scores: use a "
        "model with plain attention, or leave --exact out."
    )


for _name, _attention, _mask in (
    (TRAINER_ATTENTION, packed_attention, packed_mask),
    (ENGINE_ATTENTION, row_attention, native_mask),
):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _mask)
