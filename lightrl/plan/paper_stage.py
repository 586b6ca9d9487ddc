"""A stage of --strategy megatron on paper: layers that keep the same tensors as a rank's, without megatron-core.

The layers of megatron-core need a GPU and the package. These repeat their operations one by one on this rank's shapes,
with the leaf modules of strategy/megatron/modules.py. Messages have only sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightrl.models.logprobs import chosen_logprobs
from lightrl.models.packed_attention import Scoring, packed_layout
from lightrl.strategy.megatron.modules import Experts, Norm, attend_to_all, rotate
from lightrl.strategy.megatron.packing import Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """The shape of a rank's part of a layer and of a micro-batch."""

    hidden_size: int
    num_heads: int
    num_groups: int  # groups of queries, each with one head of keys and values
    head_size: int
    width: int  # width of the MLP, or this rank's columns of an expert
    num_rows: int  # of the vocabulary
    has_query_norm: bool
    has_bias: bool
    num_experts: int  # on this rank; 0: the layer has an MLP
    all_experts: int
    experts_per_token: int
    expert_parts: int  # ranks that split an expert
    split_by: int  # ranks that split the tokens between the matrices; 1: no split
    cp: int  # ranks that split each sequence
    lengths: tuple[int, ...]  # of the sequences, including padding
    num_scored: int  # tokens whose logits this rank computes
    recompute: bool

    @property
    def num_tokens(self) -> int:
        """The number of this rank's tokens."""
        return sum(self.lengths) // self.cp


class _Gather(torch.autograd.Function):
    """Expands this rank's tokens to those of all ranks; the backward reduces the gradient to this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, count: int) -> Tensor:
        ctx.count = count
        return part.repeat(count, *[1] * (part.dim() - 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][: grads[0].shape[0] // ctx.count].clone(), None


class _Scatter(torch.autograd.Function):
    """Keeps this rank's tokens of a sum; the backward expands their gradient to all tokens."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, count: int) -> Tensor:
        ctx.count = count
        return whole[: whole.shape[0] // count].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].repeat(ctx.count, *[1] * (grads[0].dim() - 1)), None


class _Product(torch.autograd.Function):
    """Multiplies the tokens of all ranks but saves only this rank's: the backward gathers them again."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.count = count
        return F.linear(part.repeat(count, 1, 1) if count > 1 else part, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        part, weight = ctx.saved_tensors
        whole = part.repeat(ctx.count, 1, 1) if ctx.count > 1 else part
        grad_whole = grads[0] @ weight
        grad_part = grad_whole[: part.shape[0]].clone() if ctx.count > 1 else grad_whole
        return grad_part, grads[0].flatten(0, 1).T @ whole.flatten(0, 1), None


class _Columns(nn.Module):
    """Several projections whose rows are joined for one product, as in strategy/megatron/modules.py."""

    def __init__(self, input_size: int, rows: Sequence[int], groups: int, *, bias: bool, split_by: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.empty(count, input_size) for count in rows])
        self.biases = nn.ParameterList([torch.empty(count) for count in rows] if bias else [])
        self._groups, self._split_by = groups, split_by

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = _Product.apply(hidden, self._joined(self.weights), self._split_by)  # type: ignore[no-untyped-call]
        return output + self._joined(self.biases) if len(self.biases) else output

    def _joined(self, parts: nn.ParameterList) -> Tensor:
        if self._groups == 1:
            return torch.cat([*parts])
        return torch.cat([part.unflatten(0, (self._groups, -1)) for part in parts], dim=1).flatten(0, 1)


class _Attention(nn.Module):
    def __init__(self, shape: RankShape) -> None:
        super().__init__()
        self._shape = shape
        size, heads, groups = shape.head_size, shape.num_heads, shape.num_groups
        rows = [heads * size, groups * size, groups * size]
        self.qkv = _Columns(shape.hidden_size, rows, groups, bias=shape.has_bias, split_by=shape.split_by)
        self.norms = nn.ModuleList([Norm(None, size), Norm(None, size)] if shape.has_query_norm else [])
        self.output = nn.Parameter(torch.empty(shape.hidden_size, heads * size))

    def forward(self, hidden: Tensor, pack: Pack) -> Tensor:
        shape = self._shape
        count = shape.num_heads // shape.num_groups
        mixed = self.qkv(hidden).view(-1, shape.num_groups, (count + 2) * shape.head_size)
        query, key, value = mixed.split([count * shape.head_size, shape.head_size, shape.head_size], dim=2)
        query = query.reshape(-1, shape.num_heads, shape.head_size)
        if len(self.norms):
            query, key = self.norms[0](query), self.norms[1](key)
        states = F.linear(self._attend(query, key, value, pack)[:, None], self.output)
        scattered: Tensor = _Scatter.apply(states, shape.split_by) if shape.split_by > 1 else states  # type: ignore[no-untyped-call]
        return scattered

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, pack: Pack) -> Tensor:
        shape, scale = self._shape, self._shape.head_size**-0.5
        assert pack.angles is not None
        query, key = rotate(query, *pack.angles), rotate(key, *pack.angles)
        if pack.joined is None:
            scoring = Scoring(scale=scale, window=None, softcap=None, sinks=None)
            parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
            layout = packed_layout(pack.cu_seqlens, query.device)
            return layout.attend(parts[0], parts[1], parts[2], scoring).reshape(query.shape[0], -1)
        key, value = (_Gather.apply(part.contiguous(), shape.cp)[pack.joined] for part in (key, value))  # type: ignore[no-untyped-call]
        return attend_to_all(query, key, value, pack, scale)


class _MLP(nn.Module):
    def __init__(self, shape: RankShape) -> None:
        super().__init__()
        self._split_by = shape.split_by
        self.gate_up = _Columns(shape.hidden_size, [shape.width] * 2, 1, bias=False, split_by=shape.split_by)
        self.down = nn.Parameter(torch.empty(shape.hidden_size, shape.width))

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        states = F.linear(F.silu(gate) * (up + 0.0), self.down)  # megatron-core adds an offset of 0
        scattered: Tensor = _Scatter.apply(states, self._split_by) if self._split_by > 1 else states  # type: ignore[no-untyped-call]
        return scattered


class _Counts(list[int]):
    """Stands for a tensor with the number of tokens of each expert, which would need values."""

    def tolist(self) -> list[int]:
        return self


class _Mixture(nn.Module):
    """Experts with even loads: a rank receives as many tokens as it sends."""

    def __init__(self, shape: RankShape) -> None:
        super().__init__()
        self._shape = shape
        config = SimpleNamespace(
            moe_ffn_hidden_size=shape.width, expert_tensor_parallel_size=1, hidden_size=shape.hidden_size
        )
        self.router = nn.Parameter(torch.empty(shape.all_experts, shape.hidden_size))
        self.experts = Experts(shape.num_experts, config)

    def forward(self, hidden: Tensor) -> Tensor:
        shape, own = self._shape, hidden[:, 0]
        logits = F.linear(own, self.router)
        top = logits.topk(shape.experts_per_token, dim=1)
        weights = top.values.float().softmax(-1).to(logits.dtype)
        dense = torch.zeros_like(logits).scatter(1, top.indices, weights)
        sent = torch.zeros(own.shape[0] * shape.experts_per_token, dtype=torch.int64, device=own.device)
        tokens = _Gather.apply(own[sent], shape.expert_parts)  # type: ignore[no-untyped-call]  # the message
        tokens = tokens + 0.0 if shape.num_experts > 1 else tokens  # sorted by expert
        scale = _Gather.apply(dense.flatten()[sent], shape.expert_parts)  # type: ignore[no-untyped-call]
        each, rest = divmod(tokens.shape[0], shape.num_experts)
        counts = _Counts(each + (number < rest) for number in range(shape.num_experts))
        output, _ = self.experts(tokens, counts, scale)
        output = output + 0.0 if shape.num_experts > 1 else output  # back in the order of the messages
        back = _Scatter.apply(output, shape.expert_parts)  # type: ignore[no-untyped-call]
        return torch.zeros_like(own).index_add(0, sent, back)[:, None]


class _Layer(nn.Module):
    def __init__(self, shape: RankShape) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = Norm(None, shape.hidden_size), Norm(None, shape.hidden_size)
        self.attention = _Attention(shape)
        self.mlp = _Mixture(shape) if shape.num_experts else _MLP(shape)

    def forward(self, hidden: Tensor, pack: Pack) -> Tensor:
        hidden = hidden + self.attention(self.before_attention(hidden), pack)
        output: Tensor = hidden + self.mlp(self.before_mlp(hidden))
        return output


class PaperStage(nn.Module):
    """Some layers, perhaps with the embedding before them or the output head after them."""

    def __init__(self, shape: RankShape, num_layers: int, *, is_first: bool, is_last: bool, has_output: bool) -> None:
        super().__init__()
        self._shape = shape
        table = (shape.num_rows, shape.hidden_size)
        self.embedding = nn.Parameter(torch.empty(table)) if is_first else None
        self.layers = nn.ModuleList([_Layer(shape) for _ in range(num_layers)])
        self.norm = Norm(None, shape.hidden_size) if is_last else None
        self.output = nn.Parameter(torch.empty(table)) if is_last and has_output else None

    def pack(self) -> Pack:
        """Lays a micro-batch out without positions, which would need values."""
        shape = self._shape
        numbers = torch.zeros(sum(shape.lengths), dtype=torch.int64)
        angles = torch.zeros(shape.num_tokens, 1, shape.head_size)
        return Pack(
            cu_seqlens=(0, *accumulate(shape.lengths)),
            source=numbers[: shape.num_tokens],
            where=numbers,
            own_positions=tuple(numbers[: length // shape.cp] for length in shape.lengths),
            joined=numbers if shape.cp > 1 else None,
            angles=(angles, angles.clone()),
        )

    def forward(self, pack: Pack) -> Tensor:
        """Returns the states after the last layer, or log-probabilities if this stage has the output head."""
        shape = self._shape
        hidden: Any = self._input()
        for layer in self.layers:
            is_kept = not (shape.recompute and torch.is_grad_enabled())
            hidden = layer(hidden, pack) if is_kept else checkpoint(layer, hidden, pack, use_reentrant=False)
        states: Tensor = hidden if self.norm is None else self.norm(hidden)
        if self.norm is not None and shape.split_by > 1:
            states = _Gather.apply(states, shape.split_by)  # type: ignore[no-untyped-call]
        if self.output is None:
            return states
        chosen = torch.zeros(shape.num_scored, dtype=torch.int64, device=states.device)
        return torch.stack(chosen_logprobs(states[chosen, 0], self.output, chosen))

    def _input(self) -> Tensor:
        shape, some = self._shape, next(self.parameters())
        if self.embedding is None:  # the message of the previous stage
            states = torch.empty(shape.num_tokens // shape.split_by, 1, shape.hidden_size, dtype=some.dtype)
            states.requires_grad_(torch.is_grad_enabled())
            return states
        ids = torch.zeros(shape.num_tokens, dtype=torch.int64)
        hidden = F.embedding(ids, self.embedding)[:, None]
        split: Tensor = _Scatter.apply(hidden, shape.split_by) if shape.split_by > 1 else hidden  # type: ignore[no-untyped-call]
        return split
