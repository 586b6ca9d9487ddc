"""The forward of the Llama family (Llama, Mistral, Qwen2, Qwen3) in few and large operations.

At small batch the modules of transformers spend more on dispatch than on arithmetic. This reads the same parameters:
the projections that share an input are laid side by side in one storage of which the parameters become views, so
weights copied into the parameters arrive here too. Only the norms' weights need refresh() after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightrl.engines.native.kv_cache import SlotCache, round_up

_FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Their frequencies depend on nothing but the position, so cosines and sines can be tabulated.
_FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn"})


class FusedLinear:
    """Linear layers of one input as one product; their parameters become views of its storage.

    The storage is [in, out], the layout that matrix products of few rows read fastest.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = layers
        self.weight, self.bias = self._lay_side_by_side()

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs.mm(self.weight) if self.bias is None else torch.addmm(self.bias, inputs, self.weight)

    def refresh(self) -> None:
        """Fuses anew if something (a move to another device and back) gave the parameters storage of their own."""
        start = self.weight.untyped_storage().data_ptr()
        if any(layer.weight.untyped_storage().data_ptr() != start for layer in self._layers):
            self.weight, self.bias = self._lay_side_by_side()

    @torch.no_grad()
    def _lay_side_by_side(self) -> tuple[Tensor, Tensor | None]:
        weight = torch.cat([layer.weight for layer in self._layers]).t().contiguous()
        sizes = [layer.out_features for layer in self._layers]
        for layer, part in zip(self._layers, weight.split(sizes, dim=1), strict=True):
            layer.weight.data = part.t()
        if self._layers[0].bias is None:
            return weight, None
        bias = torch.cat([layer.bias for layer in self._layers])
        for layer, part in zip(self._layers, bias.split(sizes), strict=True):
            layer.bias.data = part
        return weight, bias


class RMSNorm:
    """x * weight / sqrt(mean(x^2) + eps) of parameters [dim], or of several laid one under another, [heads, dim]."""

    def __init__(self, parameters: list[Tensor], eps: float) -> None:
        self._parameters = parameters
        self._eps = eps
        self.refresh()

    def __call__(self, values: Tensor) -> Tensor:
        if not self._is_fp32_on_cpu:
            return F.rms_norm(values, values.shape[-1:], None, self._eps).mul_(self._weight)
        # rms_norm is a dozen small operations on a CPU; this is x * (weight * sqrt(dim)) / sqrt(|x|^2 + dim * eps).
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        return (values * self._scaled).div_(length.hypot_(self._floor))

    @torch.no_grad()
    def refresh(self) -> None:
        """To be called after the parameters changed."""
        first = self._parameters[0]
        if any(parameter.untyped_storage().nbytes() == 0 for parameter in self._parameters):
            return  # dropped while the engine sleeps: reading them would be a crash, and loading them refreshes anew
        self._weight = first if len(self._parameters) == 1 else torch.stack(self._parameters)
        self._is_fp32_on_cpu = first.dtype == torch.float32 and first.device.type == "cpu"
        root = math.sqrt(first.shape[0])
        self._scaled = self._weight * root
        self._floor = torch.tensor(root * math.sqrt(self._eps), device=first.device)


@dataclass(slots=True)
class _Layer:
    index: int
    input_norm: RMSNorm
    qkv: FusedLinear
    head_norm: RMSNorm | None  # of the queries and keys, head by head
    output: FusedLinear
    mlp_norm: RMSNorm
    gate_up: FusedLinear
    down: FusedLinear
    window: int | None

    def refresh(self) -> None:
        for part in (self.input_norm, self.qkv, self.head_norm, self.output, self.mlp_norm, self.gate_up, self.down):
            if part is not None:
                part.refresh()


class FusedForward:
    """Prompts, or one token a row, through the parameters of a model and the rows of a cache."""

    @classmethod
    def build(cls, model: PreTrainedModel) -> FusedForward | None:
        """None for a model that it does not know to the last operation."""
        return cls(model) if _is_known(model) else None

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self._model = model
        self._body: Any = model.get_decoder()  # its class is one of several
        self._head: Any = model.get_output_embeddings()
        attention = self._body.layers[0].self_attn
        self._dim: int = attention.head_dim
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._intermediate_size: int = config.intermediate_size
        self._scaling: float = attention.scaling
        self._last_norm = RMSNorm([self._body.norm.weight], config.rms_norm_eps)
        self._layers = [self._read_layer(index, layer, config) for index, layer in enumerate(self._body.layers)]
        self._rope = torch.empty(0, 2, self._dim)
        self._ramps = {layer.window: torch.empty(0) for layer in self._layers}
        self.refresh()

    def refresh(self) -> None:
        """Brings what is derived from the parameters up to date."""
        self._last_norm.refresh()
        for layer in self._layers:
            layer.refresh()

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Logits [n, vocab] of tokens [n] at positions [n], for which the cache's decode phase is set."""
        masks = {window: self._mask(cache, window) for window in self._ramps}
        grouped = (len(tokens) * self._num_kv_heads, self._num_heads // self._num_kv_heads, self._dim)

        def attend(layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.append(keys, values, layer.index)
            keys, values = cache.looked_at(layer.index)
            scores = torch.baddbmm(masks[layer.window], queries.reshape(grouped), keys, alpha=self._scaling)
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
            return torch.bmm(weights, values).view(len(tokens), -1)

        hidden = self._run(tokens, self._cos_sin(positions, cache.capacity), attend)
        return F.linear(hidden, self._head.weight)

    def prefill(self, ids: Tensor, last: Tensor, cache: SlotCache) -> Tensor:
        """Logits [b, vocab] after place last[j] of each row of ids [b, t], for which the prefill phase is set."""
        rows, width = ids.shape
        positions = torch.arange(width, device=ids.device)
        masks = {layer.window: _prompt_mask(positions, layer.window) for layer in self._layers}

        def attend(layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            queries, keys, values = (
                part.reshape(rows, width, -1, self._dim).transpose(1, 2) for part in (queries, keys, values)
            )
            cache.update(keys, values, layer.index)
            mask = masks[layer.window]
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=self._scaling, enable_gqa=True
            )
            return mixed.transpose(1, 2).reshape(rows * width, -1)

        kept = torch.arange(rows, device=ids.device) * width + last
        hidden = self._run(ids.flatten(), self._cos_sin(positions.repeat(rows), cache.capacity), attend, kept)
        return F.linear(hidden, self._head.weight)

    def _run(
        self, tokens: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[..., Tensor], kept: Tensor | None = None
    ) -> Tensor:
        """Normed hidden states of tokens [n], or of those at the places kept; `attend` says what each may look at."""
        hidden = F.embedding(tokens, self._body.embed_tokens.weight)  # a copy: the layers add to it in place
        halves = (self._intermediate_size, self._intermediate_size)
        for layer in self._layers:
            queries, keys, values = self._project(layer, layer.input_norm(hidden), rope)
            mixed = attend(layer, queries, keys, values)
            if kept is not None and layer is self._layers[-1]:  # nothing looks at the others any more
                hidden, mixed = hidden.index_select(0, kept), mixed.index_select(0, kept)
            hidden.addmm_(mixed, layer.output.weight)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).split_with_sizes(halves, 1)
            hidden.addmm_(F.silu(gate).mul_(up), layer.down.weight)
        return self._last_norm(hidden)

    def _project(self, layer: _Layer, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [n, heads, dim], rotated keys and values [n, kv_heads, dim]."""
        heads, kv_heads, dim = self._num_heads, self._num_kv_heads, self._dim
        projected = layer.qkv(hidden).view(-1, heads + 2 * kv_heads, dim)
        rotated, values = projected.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if layer.head_norm is not None:
            rotated = layer.head_norm(rotated)
        cos, sin = rope
        # rotate_half(x) * sin, with the sign of the first half moved into the table.
        parts = (heads, kv_heads)  # added up apart, so that the queries come out contiguous
        queries, keys = (rotated * cos).split_with_sizes(parts, 1)
        other_queries, other_keys = rotated.roll(dim // 2, -1).split_with_sizes(parts, 1)
        return torch.addcmul(queries, other_queries, sin), torch.addcmul(keys, other_keys, sin), values

    def _cos_sin(self, positions: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the positions, [n, 1, dim] each."""
        weight = self._head.weight
        if self._rope.shape[0] < capacity or self._rope.device != weight.device or self._rope.dtype != weight.dtype:
            places = torch.arange(round_up(capacity, 256), device=weight.device)[None]
            cos, sin = self._body.rotary_emb(weight, places)
            half = self._dim // 2
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            self._rope = torch.stack((cos[0], signed), dim=1)
        chosen = self._rope.index_select(0, positions)
        return chosen[:, :1], chosen[:, 1:]

    def _mask(self, cache: SlotCache, window: int | None) -> Tensor:
        """Additive, [n * kv_heads or 1, 1, places]: what baddbmm starts from.

        What a query at position p may look at is what one at position 0 may, shifted by p: every row of the mask is a
        window of one ramp of [-inf, ..., -inf, 0, ..., 0, -inf, ..., -inf].
        """
        phase, weight, ramp = cache.decode_phase, self._head.weight, self._ramps[window]
        if len(ramp) < 2 * cache.capacity or ramp.device != weight.device or ramp.dtype != weight.dtype:
            half = round_up(cache.capacity, 256)
            distance = half - torch.arange(2 * half, device=weight.device)  # from the query's place back to the key's
            is_seen = (distance >= 0) & (distance < (half if window is None else window))
            ramp = torch.zeros(2 * half, dtype=weight.dtype, device=weight.device).masked_fill_(~is_seen, float("-inf"))
            self._ramps[window] = ramp
        half = len(ramp) // 2
        if phase.shared_place is not None:
            return ramp[half - phase.shared_place :][: phase.num_places].view(1, 1, -1)
        starts = (half - phase.positions).repeat_interleave(self._num_kv_heads)
        return ramp.unfold(0, phase.num_places, 1)[starts][:, None]

    def _read_layer(self, index: int, module: Any, config: Any) -> _Layer:
        attention, mlp, eps = module.self_attn, module.mlp, config.rms_norm_eps
        head_norms = []
        if hasattr(attention, "q_norm"):
            head_norms = [attention.q_norm.weight] * self._num_heads + [attention.k_norm.weight] * self._num_kv_heads
        return _Layer(
            index=index,
            input_norm=RMSNorm([module.input_layernorm.weight], eps),
            qkv=FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj]),
            head_norm=RMSNorm(head_norms, eps) if head_norms else None,
            output=FusedLinear([attention.o_proj]),
            mlp_norm=RMSNorm([module.post_attention_layernorm.weight], eps),
            gate_up=FusedLinear([mlp.gate_proj, mlp.up_proj]),
            down=FusedLinear([mlp.down_proj]),
            window=getattr(config if config.model_type == "mistral" else attention, "sliding_window", None),
        )


def _prompt_mask(positions: Tensor, window: int | None) -> Tensor | None:
    """True where a query may look, [t, t]; None for the plain causal rule."""
    if window is None or len(positions) <= window:
        return None
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window)


def _is_known(model: PreTrainedModel) -> bool:
    """Whether every part is exactly what FusedForward computes."""
    if type(model).__name__ not in _FAMILIES or not type(model).__module__.startswith("transformers."):
        return False
    body: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    config = model.config
    if config.hidden_act != "silu" or body.rotary_emb.rope_type not in _FIXED_ROPES:
        return False
    if type(head) is not nn.Linear or head.bias is not None:
        return False
    return all(_has_plain_linears(layer) for layer in body.layers)


def _has_plain_linears(layer: Any) -> bool:
    """No adapter, no quantised weight, and biases only where the fused products add them."""
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    attention, mlp = layer.self_attn, layer.mlp
    without_bias = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return (
        len(linears) == 7
        and all(type(linear) is nn.Linear for linear in linears)
        and all(linear.bias is None for linear in without_bias)
    )
