"""The leaf modules of a megatron-core layer in plain torch; each parameter is a part of one Hugging Face tensor.

They need neither Transformer Engine nor Apex. megatron-core is imported only when they are built, so that this module
can be imported without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn import functional as F

from lightrl.models.packed_attention import Scoring, grouped_attention, packed_layout
from lightrl.strategy.megatron.packing import Pack


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **ignored: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalizes each token, or each head of it."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Columns(nn.Module):
    """Several projections of one input, computed by one product; each rank holds some rows of each.

    The product's rows are ordered in groups: in each group, the first projection's rows come first, and so on.
    """

    def __init__(self, input_size: int, rows: dict[str, int], *, groups: int, bias: bool, config: Any, tp: int) -> None:
        super().__init__()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import layers

        self._layers, self._group = layers, parallel_state.get_tensor_model_parallel_group()
        self._names, self._groups = tuple(rows), groups
        self._is_split, self._sequence_parallel = tp > 1, config.sequence_parallel
        for name, count in rows.items():
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(count, input_size)))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(count)))
        self._has_bias = bias

    def _interleaved(self, kind: str) -> Tensor:
        parts: list[Tensor] = [self.get_parameter(f"{name}_{kind}") for name in self._names]
        if self._groups == 1:
            return torch.cat(parts)
        grouped = [part.unflatten(0, (self._groups, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Maps [T, 1, H] to [T, 1, this rank's rows]; with sequence parallelism, each rank gives some of the tokens."""
        weight = self._interleaved("weight")
        multiply: Any = (
            self._layers.linear_with_grad_accumulation_and_async_allreduce
            if weight.requires_grad
            else self._layers.linear_with_frozen_weight
        )
        output: Tensor = multiply(
            input=hidden,
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=self._is_split and not self._sequence_parallel,
            sequence_parallel=self._is_split and self._sequence_parallel,
            tp_group=self._group,
        )
        return (output + self._interleaved("bias") if self._has_bias else output), None


class QueryKeyValue(Columns):
    """The projections of self-attention, ordered by group of queries, as megatron-core expects."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, bias: bool, **ignored: Any) -> None:
        tp = config.tensor_model_parallel_size
        groups = config.num_query_groups // tp
        size = config.kv_channels * groups
        rows = {"q": size * (config.num_attention_heads // config.num_query_groups), "k": size, "v": size}
        super().__init__(input_size, rows, groups=groups, bias=bias, config=config, tp=tp)


class GateAndUp(Columns):
    """The first projections of a gated MLP."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **ignored: Any) -> None:
        tp = config.tensor_model_parallel_size
        half = output_size // 2 // tp
        super().__init__(input_size, {"gate": half, "up": half}, groups=1, bias=False, config=config, tp=tp)


class Rows(nn.Module):
    """A projection whose input is split over the ranks; its output is the sum of the ranks' products."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **ignored: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import mappings

        tp = config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.empty(output_size, input_size // tp))
        reduce = mappings.reduce_scatter_to_sequence_parallel_region
        self._reduce: Any = reduce if config.sequence_parallel else mappings.reduce_from_tensor_model_parallel_region

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Maps [T, 1, this rank's columns] to [T, 1, H], or to this rank's tokens with sequence parallelism."""
        return self._reduce(F.linear(hidden, self.weight)), None


class Experts(nn.Module):
    """This rank's experts, or its columns of them: gated MLPs over tokens that are sorted by expert."""

    def __init__(self, num_experts: int, config: Any, submodules: Any = None, **ignored: Any) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, width, config.hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, config.hidden_size, width))

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Maps [T, H] to [T, H], each token times its weight; every expert takes part in every backward."""
        counts: Sequence[int] = tokens_per_expert.tolist()
        outputs = []
        for expert, part, scale in zip(range(len(counts)), tokens.split(counts), weights.split(counts), strict=True):
            gate, up = F.linear(part, self.gate_up[expert].flatten(0, 1)).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up * scale[:, None].to(gate.dtype), self.down[expert]))
        return torch.cat(outputs), None


class PackedAttention(nn.Module):
    """Causal attention within each sequence of a pack, after the rotary embedding.

    If ranks split the tokens of a sequence, the keys and values of all of them are gathered.
    """

    def __init__(self, config: Any, **ignored: Any) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self._scale = config.kv_channels**-0.5
        is_split = config.context_parallel_size > 1
        self._group: Any = parallel_state.get_context_parallel_group() if is_split else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Tensor:
        """Maps queries, keys and values of this rank's tokens, [t, heads, size], to [t, heads x size]."""
        pack: Pack = settings["packed_seq_params"].pack
        assert pack.angles is not None
        query, key = rotate(query, *pack.angles), rotate(key, *pack.angles)
        if pack.joined is None:
            scoring = Scoring(scale=self._scale, window=None, softcap=None, sinks=None)
            layout = packed_layout(pack.cu_seqlens, query.device)
            parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
            return layout.attend(parts[0], parts[1], parts[2], scoring).reshape(query.shape[0], -1)
        key, value = (self._gathered(part)[pack.joined] for part in (key, value))
        return attend_to_all(query, key, value, pack, self._scale)

    def _gathered(self, part: Tensor) -> Tensor:
        # torch.distributed.nn.functional.all_gather has a wrong backward in a group other than the world.
        gathered: Any = functional.all_gather_tensor_autograd(part.contiguous(), 0, self._group)
        whole: Tensor = gathered.wait() if isinstance(gathered, functional.AsyncCollectiveTensor) else gathered
        return whole


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scale: float) -> Tensor:
    """Maps a rank's queries, [t, heads, size], and all ranks' keys and values to [t, heads x size]."""
    lengths = [end - start for start, end in zip(pack.cu_seqlens, pack.cu_seqlens[1:], strict=False)]
    queries = query.split([own.shape[0] for own in pack.own_positions])
    outputs = []
    for own, q, k, v in zip(pack.own_positions, queries, key.split(lengths), value.split(lengths), strict=True):
        mask = own[:, None] >= torch.arange(k.shape[0], device=k.device)
        heads = [part.transpose(0, 1)[None] for part in (q, k, v)]
        outputs.append(grouped_attention(heads[0], heads[1], heads[2], mask, scale)[0].transpose(0, 1))
    return torch.cat(outputs).reshape(query.shape[0], -1)


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Applies the rotary embedding to [t, heads, size]: it rotates pairs of numbers that are half a head apart."""
    first, second = states.chunk(2, dim=-1)
    return states * cosines.to(states.dtype) + torch.cat([-second, first], dim=-1) * sines.to(states.dtype)
