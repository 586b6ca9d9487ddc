"""Attention for transformers models over sequences laid end to end in one row, without padding and without a mask.

It is registered with transformers as "lightrl_packed". The boundaries of the sequences travel along with the hidden
states, as a keyword argument of the model's forward, so gradient checkpointing recomputes a layer with the right ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.utils.import_utils import is_flash_attn_2_available

from lightrl.models.attention_blocks import Attend, in_turn, in_windows
from lightrl.models.fixed_rope import fix_frequencies
from lightrl.models.token_split import SequenceGroup, Tokens, split_tokens

Embedding: TypeAlias = Callable[[Tokens], Mapping[str, Any]]
ATTENTION_NAME = "lightrl_packed"
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
LAYOUT_KEYWORD = "packed_layout"
# Model types that mix tokens in a way that neither their layer types nor their attention reveals.
MIXES_TOKENS = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "biogpt",
        "blenderbot",
        "blenderbot-small",
        "deepseek_v32",
        "doge",
        "glm_moe_dsa",
        "inkling_text",
        "marian",
        "mbart",
        "pegasus",
        "plbart",
        "recurrent_gemma",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """The boundaries of the sequences of a pack, in the forms that attention needs."""

    cu_seqlens: tuple[int, ...]  # S + 1 boundaries, from 0 to T
    runs: tuple[tuple[int, int], ...]  # (number of sequences, their length): adjacent sequences of equal length
    boundaries: Tensor | None  # cu_seqlens as int32 on the device, for flash-attention; None if that is not installed

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack that this rank runs."""
        return self.cu_seqlens[-1]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(length for _, length in self.runs)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes causal attention within each sequence: [1, T, heads, dim]."""
        attend = _attend_by_flash if query.is_cuda and _flash_serves(query, value, scoring) else _attend_by_runs
        return attend(query, key, value, self, scoring)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayout(PackedLayout):
    """The boundaries of a pack whose tokens are split over a group of ranks; attention splits the heads instead."""

    group: SequenceGroup
    whole: PackedLayout  # of the whole pack, over which each rank's heads attend

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack that this rank runs."""
        return self.cu_seqlens[-1] // self.group.size

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes the attention over the whole pack: [1, T / size, heads, dim]."""
        query, key, value, sinks = _to_heads(self.group, query, key, value, scoring.sinks)
        return self.group.exchange(self.whole.attend(query, key, value, replace(scoring, sinks=sinks)))


CURRENT_LAYOUT: ContextVar[PackedLayout | None] = ContextVar("packed_layout", default=None)


def packed_layout(cu_seqlens: tuple[int, ...], device: torch.device) -> PackedLayout:
    """Returns the layout of a pack with these boundaries."""
    lengths = (end - start for start, end in pairwise(cu_seqlens))
    return PackedLayout(
        cu_seqlens=cu_seqlens,
        runs=tuple((len(list(same)), length) for length, same in groupby(lengths)),
        boundaries=_on_gpu(cu_seqlens, device) if device.type == "cuda" and _has_flash_attention() else None,
    )


def _on_gpu(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """Copies boundaries from pinned memory, so that the host need not wait for all earlier work of the device."""
    return torch.tensor(cu_seqlens, dtype=torch.int32).pin_memory().to(device, non_blocking=True)


def _split(tokens: Tokens, group: SequenceGroup) -> tuple[Tokens, SplitLayout]:
    """Returns this rank's tokens of a pack, and the layout of the whole pack."""
    mine = split_tokens(tokens, group)
    whole = packed_layout(mine.cu_seqlens, mine.input_ids.device)
    parts = {field.name: getattr(whole, field.name) for field in fields(whole)}
    return mine, SplitLayout(**parts, group=group, whole=whole)


def use_packed_attention(decoder: PreTrainedModel) -> bool:
    """Makes a decoder's attention accept packs; returns whether a whole pack can then run through the decoder."""
    config = decoder.config
    decoder.set_attn_implementation(ATTENTION_NAME)
    if varies_with_length(config):
        fix_frequencies(decoder)
    return config._attn_implementation == ATTENTION_NAME and mixes_by_attention(config)


def varies_with_length(config: Any) -> bool:
    """Returns whether transformers chooses the rotary frequencies by the longest sequence of each call."""
    kinds = str(getattr(config.get_text_config(), "rope_parameters", None))
    return "longrope" in kinds or "dynamic" in kinds


def mixes_by_attention(config: Any) -> bool:
    """Returns whether a model mixes tokens by attention alone, of a kind that accepts packs."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    return layer_types <= LAYER_TYPES and config.model_type not in MIXES_TOKENS


def packed_hidden_states(
    decoder: nn.Module, tokens: Tokens, embed: Embedding | None = None, group: SequenceGroup | None = None
) -> Tensor:
    """Returns the last hidden states, [T, H], of sequences laid end to end.

    Args:
        decoder: a model that use_packed_attention() has prepared.
        tokens: usually a PackedBatch.
        embed: returns what the decoder takes instead of the input_ids of some tokens; None for text alone.
        group: ranks among which the tokens are split; the result then holds this rank's tokens only.
    """
    layout = packed_layout(tokens.cu_seqlens, tokens.input_ids.device)
    if layout.num_tokens != len(tokens.input_ids):
        raise ValueError(f"cu_seqlens ends at {layout.num_tokens} for {len(tokens.input_ids)} tokens: they must agree.")
    if group is not None:
        tokens, layout = _split(tokens, group)
    inputs: dict[str, Any] = {"input_ids": tokens.input_ids[None]} if embed is None else dict(embed(tokens))
    if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(decoder.forward).parameters.values()):
        inputs[LAYOUT_KEYWORD] = layout
    token = CURRENT_LAYOUT.set(layout)
    try:
        output = decoder(position_ids=tokens.position_ids.unsqueeze(-2), use_cache=False, **inputs)
    finally:
        CURRENT_LAYOUT.reset(token)
    hidden: Tensor = output[0]
    return hidden.squeeze(0)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each sequence of the pack; each attention layer of transformers calls it.

    Args:
        query: [1, num_heads, T, head_dim]; key and value may have fewer heads (grouped-query attention).
        attention_mask: the result of packed_mask().
        sliding_window: a token sees itself and the sliding_window - 1 before it.
        softcap: attention scores become softcap * tanh(scores / softcap).
        s_aux: [num_heads] attention sinks: a score per head that takes weight and gives no value.

    Returns:
        The output, [1, T, num_heads, head_dim], and no attention weights.
    """
    layout = kwargs.get(LAYOUT_KEYWORD) or CURRENT_LAYOUT.get()
    if layout is None:
        raise _no_layout(module)
    adds_to_scores = isinstance(attention_mask, Tensor) or kwargs.get("position_bias") is not None
    is_causal = getattr(module, "is_causal", True) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    fits = (query.shape[0], query.shape[2], key.shape[2]) == (1, layout.num_tokens, layout.num_tokens)
    if adds_to_scores or dropout != 0 or not (fits and is_causal):
        _refuse_call(module, query, key, layout.num_tokens, dropout, adds_to_scores)
    scoring = Scoring(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=attention_mask if sliding_window is None else sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return layout.attend(query, key, value, scoring), None


def packed_mask(*, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any) -> int | None:
    """Returns no mask, or for sliding layers the size of the window; transformers calls it instead of making a mask.

    Some models (Qwen2-MoE) pass the window to their attention through the mask alone.
    """
    if attention_mask is not None:
        raise ValueError(f"{ATTENTION_NAME} takes no attention_mask: lay the sequences end to end without padding.")
    return local_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Settings of the scores between queries and keys."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def _no_layout(module: nn.Module) -> ValueError:
    return ValueError(
        f"{type(module).__name__} was called without the boundaries of the pack. Run the model by "
        "packed_hidden_states(). If this is the recomputation of a checkpointed layer, the model does not hand keyword "
        "arguments to its attention: turn gradient checkpointing off, or choose another model."
    )


def _refuse_call(
    module: nn.Module, query: Tensor, key: Tensor, num_tokens: int, dropout: float, adds_to_scores: bool
) -> None:
    """Raises ValueError for a call of packed_attention() that would give wrong results."""
    name = type(module).__name__
    if (query.shape[0], query.shape[2], key.shape[2]) != (1, num_tokens, num_tokens):
        raise ValueError(
            f"{name} was called with queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)} for a "
            f"pack of {num_tokens} tokens: give one row of just these tokens, without a key-value cache."
        )
    if adds_to_scores:
        raise ValueError(f"{name} adds a mask or a position bias of its own, which {ATTENTION_NAME} cannot honour.")
    if dropout != 0:
        raise ValueError(f"{name} has attention dropout {dropout}: set it to 0, since the loss compares two passes.")
    raise ValueError(f"{name} is not causal: {ATTENTION_NAME} is for decoders.")


def _to_heads(
    group: SequenceGroup, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns this rank's heads of all tokens, after repeating key and value heads if there are fewer than ranks."""
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    check_heads(num_heads, num_kv_heads, group.size)
    copies = max(1, group.size // num_kv_heads)
    key, value = (_repeat_heads(part, copies * num_kv_heads) for part in (key, value))
    sinks = None if sinks is None else sinks.chunk(group.size)[group.rank]
    return group.exchange(query), group.exchange(key), group.exchange(value), sinks


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Raises ValueError unless the attention heads can be split over this many ranks."""
    valid = [
        size
        for size in range(1, num_heads + 1)
        if num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    ]
    if num_ranks not in valid:
        raise ValueError(
            f"--sp_size {num_ranks} does not fit {num_heads} attention heads and {num_kv_heads} key-value heads (of a "
            "rank of --tp_size): it must divide the heads, and divide the key-value heads or be a multiple of them. "
            f"Valid: {valid}."
        )


def stack_sequences(part: Tensor, count: int, length: int) -> Tensor:
    """Views [1, heads, count * length, dim] as [count, heads, length, dim]."""
    return part.view(part.shape[1], count, length, part.shape[3]).transpose(0, 1)


def runs_of(layout: PackedLayout, *parts: Tensor) -> list[list[Tensor]]:
    """Returns, for each run of sequences of equal length, the parts as [count, heads, length, dim]."""
    # split, not slices: its backward is one concatenation; the backward of each slice would fill a tensor with zeros.
    num_tokens = [count * length for count, length in layout.runs]
    pieces = zip(*(part.split(num_tokens, dim=2) for part in parts), strict=True)
    return [[stack_sequences(part, *run) for part in own] for run, own in zip(layout.runs, pieces, strict=True)]


def _repeat_heads(part: Tensor, num_heads: int) -> Tensor:
    repeats = num_heads // part.shape[1]
    return part if repeats == 1 else part.repeat_interleave(repeats, dim=1)


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns which keys each of the last num_queries tokens sees, [num_queries, num_keys] bool."""
    before = num_keys - num_queries
    causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(before)
    return causal if window is None else causal.triu(before + 1 - window)


def _attend_by_runs(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scoring: Scoring) -> Tensor:
    """Computes attention with one call for each run of sequences of equal length."""
    attend: Attend = _sdpa if scoring.softcap is None and scoring.sinks is None else partial(in_turn, eager_attention)
    outputs = [attend(q, k, v, scoring).transpose(1, 2).flatten(0, 1) for q, k, v in runs_of(layout, query, key, value)]
    return torch.cat(outputs)[None]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    if scoring.window is not None:
        return in_windows(_sdpa_of_window, query, key, value, scoring)
    return grouped_attention(query, key, value, None, scoring.scale)


def _sdpa_of_window(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    sees_all = scoring.window is None or scoring.window >= key.shape[2]
    mask = None if sees_all else visible(query.shape[2], key.shape[2], scoring.window, query.device)
    return grouped_attention(query, key, value, mask, scoring.scale)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Computes causal attention, or attention with a mask, where groups of heads may share a head of keys."""
    if query.is_cuda and not _flash_shares_keys(query, value, mask):
        key, value = (_repeat_heads(part, query.shape[1]) for part in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=key.shape[1] < query.shape[1]
    )


def _flash_shares_keys(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Returns whether torch's flash attention can be used. Other kernels of a GPU need a head of keys for each head.

    Given fewer, torch would compute whole matrices of scores:
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    """
    is_half = _computed_dtype(query) in (torch.bfloat16, torch.float16)
    return mask is None and is_half and query.shape[-1] == value.shape[-1] <= 256


def eager_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Computes the attention that SDPA lacks: with soft-capped scores (Gemma 2) or sinks (gpt-oss)."""
    count, num_heads, length, _ = query.shape
    num_keys = key.shape[2]
    scores = query @ _repeat_heads(key, num_heads).transpose(2, 3) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~visible(length, num_keys, scoring.window, query.device), float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(1, num_heads, 1, 1).expand(count, num_heads, length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return weights[..., :num_keys] @ _repeat_heads(value, num_heads)


@lru_cache(maxsize=1)
def _has_flash_attention() -> bool:
    return bool(is_flash_attn_2_available())  # a flash_attn package without version 2 is of no use


def _flash_serves(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Returns whether flash-attention 2 can be used: it needs half precision and one head size, and ignores sinks."""
    is_half = _computed_dtype(query) in (torch.bfloat16, torch.float16)
    takes_shape = scoring.sinks is None and query.shape[-1] == value.shape[-1]
    return is_half and takes_shape and _has_flash_attention()


def _computed_dtype(query: Tensor) -> torch.dtype:
    """Returns the type to compute attention in: under autocast, rotary embeddings leave the queries in float32."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _attend_by_flash(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scoring: Scoring) -> Tensor:
    """Computes attention with the variable-length kernel of flash-attention."""
    # Private, but it hides the differences between the releases of flash-attention. It can go when transformers exports
    # it: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/modeling_flash_attention_utils.py
    query, key, value = (part.to(_computed_dtype(query)) for part in (query, key, value))
    boundaries: Any = layout.boundaries  # declared as a LongTensor there, but the kernel needs int32
    output: Tensor = _flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        query_length=query.shape[2],
        is_causal=True,
        softmax_scale=scoring.scale,
        sliding_window=scoring.window,
        softcap=scoring.softcap,
        # Its backward ignores torch's own setting and adds in any order; None: FLASH_ATTENTION_DETERMINISTIC decides.
        deterministic=torch.are_deterministic_algorithms_enabled() or None,
        cu_seq_lens_q=boundaries,
        cu_seq_lens_k=boundaries,
        max_length_q=layout.max_length,
        max_length_k=layout.max_length,
        attn_implementation="flash_attention_2",
    )
    return output


AttentionInterface.register(ATTENTION_NAME, packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, packed_mask)
