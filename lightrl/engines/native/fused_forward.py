"""The forward of the Llama family (Llama, Mistral, Qwen2, Qwen3) in few and large operations.

At small batch the modules of transformers spend more on dispatch than on arithmetic. This reads the same parameters:
the projections that share an input are laid side by side in one storage of which the parameters become views, so
weights copied into the parameters arrive here too.
"""

from __future__ import annotations

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
        return inputs @ self.weight if self.bias is None else torch.addmm(self.bias, inputs, self.weight)

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


@dataclass(slots=True)
class _Layer:
    index: int
    input_norm: Tensor
    qkv: FusedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: FusedLinear
    mlp_norm: Tensor
    gate_up: FusedLinear
    down: FusedLinear
    window: int | None
    head_scale: Tensor | None = None  # [heads + kv_heads, dim]: the query and key norms' weights, head by head


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
        self._scaling: float = attention.scaling
        self._eps: float = config.rms_norm_eps
        self._eps_tensor = torch.tensor(self._eps)
        self._layers = [self._read_layer(index, layer, config) for index, layer in enumerate(self._body.layers)]
        self._rope = torch.empty(0, 2, self._dim)
        self.refresh()

    def refresh(self) -> None:
        """Brings what is derived from the parameters up to date."""
        for layer in self._layers:
            for fused in (layer.qkv, layer.output, layer.gate_up, layer.down):
                fused.refresh()
            if layer.query_norm is not None and layer.key_norm is not None:
                queries = layer.query_norm.detach().expand(self._num_heads, -1)
                keys = layer.key_norm.detach().expand(self._num_kv_heads, -1)
                layer.head_scale = torch.cat((queries, keys))

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Logits [n, vocab] of tokens [n] at positions [n], for which the cache's decode phase is set."""
        masks = {window: self._mask(positions, cache, window) for window in {layer.window for layer in self._layers}}

        def attend(layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            rows, heads, dim = queries.shape
            keys, values = cache.append(keys, values, layer.index)
            grouped = queries.reshape(-1, heads // self._num_kv_heads, dim)
            keys = keys.flatten(0, 1).transpose(1, 2)
            scores = torch.baddbmm(masks[layer.window], grouped, keys, alpha=self._scaling)
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
            return torch.bmm(weights, values.flatten(0, 1)).view(rows, heads * dim)

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

        hidden = self._run(ids.flatten(), self._cos_sin(positions.repeat(rows), cache.capacity), attend)
        chosen = hidden.view(rows, width, -1)[torch.arange(rows, device=ids.device), last]
        return F.linear(chosen, self._head.weight)

    def _run(self, tokens: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        """Normed hidden states [n, hidden] of tokens [n]; `attend` says what each may look at."""
        hidden = F.embedding(tokens, self._body.embed_tokens.weight)
        for layer in self._layers:
            queries, keys, values = self._project(layer, self._norm(hidden, layer.input_norm), rope)
            hidden = torch.addmm(hidden, attend(layer, queries, keys, values), layer.output.weight)
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down.weight)
        return self._norm(hidden, self._body.norm.weight)

    def _project(self, layer: _Layer, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [n, heads, dim], rotated keys and values [n, kv_heads, dim]."""
        heads, kv_heads, dim = self._num_heads, self._num_kv_heads, self._dim
        projected = layer.qkv(hidden).view(-1, heads + 2 * kv_heads, dim)
        rotated = projected[:, : heads + kv_heads]
        if layer.head_scale is not None:
            rotated = self._normalised(rotated).mul_(layer.head_scale)
        cos, sin = rope
        # rotate_half(x) * sin, with the sign of the first half moved into the table.
        rotated = torch.addcmul(rotated * cos, rotated.roll(dim // 2, -1), sin)
        return rotated[:, :heads], rotated[:, heads:], projected[:, heads + kv_heads :]

    def _norm(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return self._normalised(hidden).mul_(scale)

    def _normalised(self, values: Tensor) -> Tensor:
        """The last dimension divided by its root mean square."""
        dim = values.shape[-1]
        if values.dtype != torch.float32 or values.device.type != "cpu":
            return F.rms_norm(values, (dim,), None, self._eps)
        # rms_norm is a dozen small operations on a CPU.
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        inverse: Tensor = torch.addcmul(self._eps_tensor, length, length, value=1 / dim).rsqrt_()
        return values * inverse

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

    def _mask(self, positions: Tensor, cache: SlotCache, window: int | None) -> Tensor:
        """Additive, [n * kv_heads, group, places]: what baddbmm starts from."""
        places = torch.arange(cache.decode_phase.num_places, device=positions.device)
        hidden = places > positions[:, None]
        if window is not None:
            hidden |= places <= positions[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=self._head.weight.dtype, device=positions.device)
        mask.masked_fill_(hidden, float("-inf"))
        group = self._num_heads // self._num_kv_heads
        return mask[:, None, None].expand(-1, self._num_kv_heads, group, -1).reshape(-1, group, len(places))

    @staticmethod
    def _read_layer(index: int, module: Any, config: object) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        is_mistral = getattr(config, "model_type", None) == "mistral"
        return _Layer(
            index=index,
            input_norm=module.input_layernorm.weight,
            qkv=FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj]),
            query_norm=getattr(getattr(attention, "q_norm", None), "weight", None),
            key_norm=getattr(getattr(attention, "k_norm", None), "weight", None),
            output=FusedLinear([attention.o_proj]),
            mlp_norm=module.post_attention_layernorm.weight,
            gate_up=FusedLinear([mlp.gate_proj, mlp.up_proj]),
            down=FusedLinear([mlp.down_proj]),
            window=getattr(config if is_mistral else attention, "sliding_window", None),
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
