"""Parts: pure functions for what a rank of a Megatron layout holds of each Hugging Face tensor, and where.

A rank holds one rectangle of a tensor, or nothing. An optimizer's moments have the shape of their parameter, so they
are cut into the same rectangles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lightrl.config import StrategyOptions

ROWS, COLUMNS, WHOLE, PER_HEAD, EXPERT_ROWS, EXPERT_COLUMNS = "rows", "columns", "whole", "per head", "er", "ec"

# Hugging Face name of a layer's parameter: its place in a layer of megatron-core, and how it is cut.
_IN_LAYER = {
    "self_attn.q_proj.weight": ("self_attention.linear_qkv.q_weight", ROWS),
    "self_attn.k_proj.weight": ("self_attention.linear_qkv.k_weight", ROWS),
    "self_attn.v_proj.weight": ("self_attention.linear_qkv.v_weight", ROWS),
    "self_attn.q_proj.bias": ("self_attention.linear_qkv.q_bias", ROWS),
    "self_attn.k_proj.bias": ("self_attention.linear_qkv.k_bias", ROWS),
    "self_attn.v_proj.bias": ("self_attention.linear_qkv.v_bias", ROWS),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight", COLUMNS),
    "self_attn.q_a_proj.weight": ("self_attention.q_a_proj.weight", WHOLE),
    "self_attn.q_a_layernorm.weight": ("self_attention.q_a_layernorm.weight", WHOLE),
    "self_attn.q_b_proj.weight": ("self_attention.q_b_proj.weight", ROWS),
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attention.kv_a_proj_with_mqa.weight", WHOLE),
    "self_attn.kv_a_layernorm.weight": ("self_attention.kv_a_layernorm.weight", WHOLE),
    "self_attn.kv_b_proj.weight": ("self_attention.kv_b_proj.weight", ROWS),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight", PER_HEAD),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight", PER_HEAD),
    "input_layernorm.weight": ("input_layernorm.weight", WHOLE),
    "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight", WHOLE),
    "mlp.gate_proj.weight": ("mlp.linear_fc1.gate_weight", ROWS),
    "mlp.up_proj.weight": ("mlp.linear_fc1.up_weight", ROWS),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight", COLUMNS),
    "mlp.gate.weight": ("mlp.router.weight", WHOLE),
    "mlp.shared_experts.gate_proj.weight": ("mlp.shared_experts.linear_fc1.gate_weight", ROWS),
    "mlp.shared_experts.up_proj.weight": ("mlp.shared_experts.linear_fc1.up_weight", ROWS),
    "mlp.shared_experts.down_proj.weight": ("mlp.shared_experts.linear_fc2.weight", COLUMNS),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_up", EXPERT_ROWS),
    "mlp.experts.down_proj": ("mlp.experts.down", EXPERT_COLUMNS),
}
EMBEDDING, FINAL_NORM = "embed_tokens.weight", "norm.weight"


class Sizes(NamedTuple):
    """The sizes of a layout: the number of ranks that split each kind of thing."""

    tp: int = 1  # matrices
    pp: int = 1  # layers
    vpp: int = 1  # the layers of a stage, into chunks that take turns
    cp: int = 1  # the tokens of each sequence
    ep: int = 1  # experts
    etp: int = 1  # the matrices of an expert


def sizes_of(options: StrategyOptions) -> Sizes:
    """Returns the sizes that the options ask for."""
    chosen = options.megatron
    return Sizes(
        tp=options.tp_size,
        pp=chosen.pp_size,
        vpp=chosen.vpp_size,
        cp=chosen.cp_size,
        ep=chosen.ep_size,
        etp=chosen.etp_size,
    )


class Place(NamedTuple):
    """The place of a rank in a layout, from 0 along each axis."""

    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Names the parameter in a rank's modules that holds the rank's part of a tensor."""

    chunk: int  # which of the rank's chunks of layers
    path: str  # in that chunk
    cut: str
    joins_ends: bool = False  # a tied embedding, which the first stage and the last both hold
    is_copy: bool = False  # that of the last stage


class Part(NamedTuple):
    """A rectangle of a tensor: the shape in which the whole tensor is viewed, and the rectangle's offsets and size."""

    view: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def slot_of(name: str, sizes: Sizes, place: Place, *, num_layers: int, is_tied: bool) -> Slot | None:
    """Returns where this rank holds a decoder's parameter, None if another stage does; KeyError if unknown."""
    last = sizes.vpp - 1
    is_first_stage, is_last_stage = place.pp == 0, place.pp == sizes.pp - 1
    if name == EMBEDDING:
        if is_first_stage:
            return Slot(chunk=0, path="embedding.weight", cut=ROWS, joins_ends=is_tied and not is_last_stage)
        if not (is_tied and is_last_stage):
            return None
        return Slot(chunk=last, path="output_weight", cut=ROWS, joins_ends=True, is_copy=True)
    if name == FINAL_NORM:
        return Slot(chunk=last, path="decoder.final_layernorm.weight", cut=WHOLE) if is_last_stage else None
    prefix, _, rest = name.partition(".")
    number, _, suffix = rest.partition(".")
    path, cut = _IN_LAYER[suffix if prefix == "layers" and number.isdecimal() else name]
    chunk, index = divmod(int(number), num_layers // (sizes.pp * sizes.vpp))
    if chunk % sizes.pp != place.pp:
        return None
    return Slot(chunk=chunk // sizes.pp, path=f"decoder.layers.{index}.{path}", cut=cut)


def part_of(shape: tuple[int, ...], cut: str, sizes: Sizes, place: Place) -> Part:
    """Returns the rectangle that a rank holds of a tensor of this shape that is cut in a given way.

    The rows of a vocabulary may not divide evenly: the last ranks then hold fewer.
    """
    view, offsets = tuple(shape), [0] * len(shape)
    if cut == EXPERT_ROWS:  # [experts, gate and up, hidden] as [experts, 2, columns of the MLP, hidden]
        view, offsets = (shape[0], 2, shape[1] // 2, *shape[2:]), [0] * (len(shape) + 1)
    part = list(view)
    if cut in (EXPERT_ROWS, EXPERT_COLUMNS):
        for dim, (size, rank) in ((0, (sizes.ep, place.ep)), (2, (sizes.etp, place.etp))):
            part[dim] //= size
            offsets[dim] = part[dim] * rank
    elif cut in (ROWS, COLUMNS):
        dim = 0 if cut == ROWS else 1
        at_most = math.ceil(view[dim] / sizes.tp)
        offsets[dim] = min(at_most * place.tp, view[dim])
        part[dim] = min(at_most, view[dim] - offsets[dim])
    return Part(view, tuple(offsets), tuple(part))


def padded_rows(num_rows: int, tp: int) -> int:
    """Returns the number of rows of a vocabulary that is padded until all ranks hold as many as the first."""
    return math.ceil(num_rows / tp) * tp
