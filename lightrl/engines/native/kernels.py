"""Decode steps on a CPU with compiled kernels for all that is not a matrix product (--native.cpu_kernels).

torch needs some thirty operations for the norms, the rotation, the cache and the attention of a layer, and each of them
reads and writes memory. Here they are three functions, which read a row of the cache only as far as it is written. A
fourth one draws the tokens.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightrl.c_library import compiled
from lightrl.engines.native.amx import make_tiles
from lightrl.engines.native.cache import RowCache
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.forward import FusedForward, ModelRunner, RMSNorm
from lightrl.engines.native.sampler import PLAIN, SamplingPlan, sample
from lightrl.engines.weights.row_sums import compile_row_sums

_SOURCE = Path(__file__).with_suffix(".c")
_FEWEST_LANES = 4  # floats of the smallest registers
_CHUNKS = 4  # registers of scores per query, as in the C file
_MOST_SUMS = 28  # registers of sums, of 32 in a processor with the longest; others have half as many

_long, _pointer, _float, _int = ctypes.c_long, ctypes.c_void_p, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "rms_norm": (_long, _long, _pointer, _pointer, _float, _pointer, _int),
    "gated": (_long, _long, _pointer, _pointer, _int),
    "attend": (_long, _long, _long, *[_pointer] * 4, _float, _pointer, _float, _long, *[_pointer] * 3, _int),
    "draw": (_long, _long, *[_pointer] * 4, _int),
}


class KernelForward:
    """A fused forward whose decode steps use compiled kernels; prompts run as before."""

    def __init__(self, forward: FusedForward) -> None:
        """Compiles the kernels for the forward's model; raises ValueError or RuntimeError if that is impossible."""
        self._forward = forward
        library = compiled(_SOURCE, _constants(forward))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        tiles = make_tiles(forward.body.embed_tokens.weight)
        if tiles is not None:
            forward.pack_with(tiles)
        self._rms_norm, self._gated, self._attend, self._draw = (getattr(library, name) for name in _ARGUMENTS)

    def refresh(self) -> None:
        """Recomputes the tensors derived from the weights."""
        self._forward.refresh()

    def prefill(self, ids: Tensor, last: Tensor, cache: RowCache) -> Tensor:
        """Returns logits [b, vocab] after index last[j] of each row of ids [b, t]."""
        return self._forward.prefill(ids, last, cache)

    def decode(self, tokens: Tensor, positions: Tensor, cache: RowCache, rope_deltas: Tensor | None = None) -> Tensor:
        """Returns logits [n, vocab] of tokens [n] at positions [n]; the decode phase must be begun."""
        forward = self._forward
        turns = forward.cos_sin(positions, cache.capacity)[0]  # the first of two views of the same memory
        hidden = F.embedding(tokens, forward.body.embed_tokens.weight)
        normed = torch.empty_like(hidden)
        mixed = hidden.new_empty(len(hidden), forward.num_heads * forward.dim)
        for layer in forward.layers:
            self._norm(layer.input_norm, hidden, normed)
            self._mix(layer, layer.qkv(normed), positions, turns, cache, mixed)
            layer.output.add_to(hidden, mixed)
            self._norm(layer.mlp_norm, hidden, normed)
            layer.down.add_to(hidden, self._gate(layer.gate_up(normed)))
        self._norm(forward.last_norm, hidden, normed)
        return forward.score(normed)

    def draw(self, logits: Tensor, uniforms: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
        """Returns the result of sampler.sample(), up to rounding, and calls it for any settings but the plain ones."""
        weight = self._forward.body.embed_tokens.weight
        if plan is not PLAIN or logits.dtype != weight.dtype or not logits.is_contiguous():
            return sample(logits, uniforms, plan)
        tokens, logprobs = (
            torch.empty(len(logits), dtype=torch.int64),
            logits.new_empty(len(logits), dtype=torch.float32),
        )
        results = (tokens.data_ptr(), logprobs.data_ptr())
        self._draw(*logits.shape, logits.data_ptr(), uniforms.data_ptr(), *results, torch.get_num_threads())
        return tokens, logprobs

    def _norm(self, norm: RMSNorm, hidden: Tensor, out: Tensor) -> None:
        weight, threads = norm.parameters[0], torch.get_num_threads()
        self._rms_norm(*hidden.shape, hidden.data_ptr(), weight.data_ptr(), norm.eps, out.data_ptr(), threads)

    def _gate(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._gated(rows, width, gate_up.data_ptr(), out.data_ptr(), torch.get_num_threads())
        return out

    def _mix(
        self, layer: Any, projected: Tensor, positions: Tensor, turns: Tensor, cache: RowCache, out: Tensor
    ) -> None:
        """Stores the keys and values of the rows' tokens, and writes the attention of their queries to `out`."""
        forward, storage, norm = self._forward, cache.layer(layer.index), layer.head_norm
        weights = (None, None) if norm is None else (norm.parameters[0].data_ptr(), norm.parameters[-1].data_ptr())
        self._attend(
            len(out),
            forward.num_kv_heads,
            storage.values.shape[2],
            positions.data_ptr(),
            projected.data_ptr(),
            *weights,
            0.0 if norm is None else norm.eps,
            turns.data_ptr(),
            forward.scaling,
            layer.window or 0,
            storage.keys.data_ptr(),
            storage.values.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )


def _constants(forward: FusedForward) -> dict[str, int]:
    """Returns the macros of kernels.c for a model on this processor."""
    weight, gate_up = forward.body.embed_tokens.weight, forward.layers[0].gate_up.weight
    hidden_size, inner_size, dim = weight.shape[1], gate_up.shape[1] // 2, forward.dim
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            "--native.cpu_kernels True needs float32 or bfloat16 on a CPU: the engine's weights are "
            f"{weight.dtype} on {weight.device}. Leave it out."
        )
    has_long_registers = torch.backends.cpu.get_cpu_capability() == "AVX512"
    lanes = math.gcd(16 if has_long_registers else 8, dim // 2, hidden_size, inner_size)
    if lanes < _FEWEST_LANES or dim % 2:
        raise ValueError(
            "--native.cpu_kernels True needs heads of a multiple of 8, and hidden states and gated units of a multiple "
            f"of 4. This model has {dim}, {hidden_size} and {inner_size}. Leave it out."
        )
    return {
        "IS_BFLOAT16": weight.dtype == torch.bfloat16,
        "DIM": dim,
        "GROUP": forward.num_heads // forward.num_kv_heads,
        "TOGETHER": _queries_together(forward.num_heads // forward.num_kv_heads, dim // lanes, has_long_registers),
        "LANES": lanes,
        "HAS_NORM": forward.layers[0].head_norm is not None,
    }


def _queries_together(group: int, num_parts: int, has_long_registers: bool) -> int:
    """Returns how many queries of a group fit into registers; num_parts: registers of a head."""
    most = _MOST_SUMS if has_long_registers else _MOST_SUMS // 2
    per_query = max(_CHUNKS, num_parts)
    return max(
        count for count in range(1, group + 1) if group % count == 0 and (count == 1 or count * per_query <= most)
    )


def engine_with_kernels(make: Callable[..., NativeEngine], model: PreTrainedModel, **settings: Any) -> NativeEngine:
    """Makes an engine whose decode steps use the kernels; raises ValueError if they do not support the model."""
    engine = make(model, **settings)
    engine._runner.replace_fused(KernelForward)
    compile_row_sums()
    if engine.draw is sample:  # other engines also return what they excluded
        engine.draw_with(partial(_draw, weakref.ref(engine._runner)))  # weak, so that close() frees the model
    return engine


def _draw(
    reference: weakref.ref[ModelRunner], logits: Tensor, uniforms: Tensor, plan: SamplingPlan
) -> tuple[Tensor, Tensor]:
    runner = reference()
    kernels = None if runner is None else runner.forward_in_use
    return (kernels.draw if isinstance(kernels, KernelForward) else sample)(logits, uniforms, plan)
