"""Logits from a model and the row cache: with a few large operations if these are exact, or with its modules.

FusedForward computes the Llama family (Llama, Mistral, Qwen2, Qwen3): with small batches, transformers' modules spend
more time on dispatch than on arithmetic. It reads the same parameters: projections that share an input lie side by side
in one storage, of which the parameters become views, so weights copied into the parameters arrive here too. Only the
norms' weights need refresh() after that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightrl.engines.native.cache import RowCache, round_up
from lightrl.engines.native.forward_check import Forward, ForwardCheck
from lightrl.engines.native.modules import ModuleForward
from lightrl.engines.native.own_cache import SampleCaches, find_forward
from lightrl.engines.native.products import FusedLinear, PackedHead, PackedWeight, fused_linear, is_worth_packing
from lightrl.engines.native.replay import Launched, ReplayedForward
from lightrl.models.fixed_rope import FIXED
from lightrl.models.multimodal import FAMILIES
from lightrl.models.packed_attention import grouped_attention, visible
from lightrl.models.policy import needs_score_check
from lightrl.records import EncodedPrompt

logger = logging.getLogger(__name__)

_FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Their angles depend only on the position, so cosines and sines can be tabulated.
_FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn", FIXED})

SampleState: TypeAlias = RowCache | SampleCaches  # the kind that the current forward uses


class ModelRunner:
    """Runs prompts and single tokens with a fused forward or modules, once compared with the plain model."""

    trusts_tests = True  # whether a fused forward, which tests compare on a CPU, is not compared there again
    replays_steps = True  # whether a GPU replays decode steps: they run the same operations for any tokens
    make_cache: Callable[[], RowCache] = RowCache
    make_modules: Callable[..., ModuleForward] = ModuleForward
    make_fused: Callable[..., FusedForward] = staticmethod(lambda model: FusedForward(model))

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.prefill_tokens = 0  # prompt tokens run so far, without padding
        # A vision tower attends to whole images without a cache, so it keeps its own attention.
        self._decoder: PreTrainedModel = model.get_decoder() if model.config.model_type in FAMILIES else model
        self._fused: Launched | None = self.make_fused(model) if is_supported(model) else None
        self._modules: ModuleForward | None = None  # made when needed
        is_tested = self.trusts_tests and device.type == "cpu" and not needs_score_check(model)
        self._verified: Forward | None = self._fused if is_tested else None  # the one in use

    @property
    def uses_fused_forward(self) -> bool:
        """Whether the fused forward is used, because it was found to compute the same as the model."""
        return self._verified is not None and self._verified is self._fused

    @property
    def forward_in_use(self) -> Forward | None:
        """The forward that was found to compute the same as the model; None before the comparison."""
        return self._verified

    def replace_fused(self, make: Callable[[FusedForward], Launched]) -> None:
        """Uses the result of make() in place of the fused forward, once it was found to compute the same as the model.

        Raises ValueError if the model has no fused forward.
        """
        if not isinstance(self._fused, FusedForward):
            raise ValueError(
                f"--native.cpu_kernels True does not support {type(self.model).__name__}: only Llama, Mistral, Qwen2 "
                "and Qwen3 with standard parts. Leave it out."
            )
        self._fused, self._verified = make(self._fused), None

    def refresh(self) -> None:
        """Recomputes the tensors derived from the weights; call it after they changed."""
        if self._fused is not None:
            self._fused.refresh()

    def prefill(
        self, prompts: Sequence[Sequence[int]], target_rows: Tensor, source_prompts: Tensor, cache: SampleState
    ) -> Tensor:
        """Runs prompts into rows of the cache; returns the logits after each prompt, [prompts, vocab]."""
        self.prefill_tokens += sum(map(len, prompts))
        cache.begin_prefill(target_rows, source_prompts)
        return self._forward().prefill(*_padded(prompts, self.device), cache)

    def prefill_with_images(
        self, prompts: Sequence[EncodedPrompt], target_rows: Tensor, source_prompts: Tensor, cache: Any
    ) -> Tensor:
        """Runs prompts of a vision-language model; otherwise the same as prefill()."""
        self.prefill_tokens += sum(len(prompt.token_ids) for prompt in prompts)
        ids, last = _padded([prompt.token_ids for prompt in prompts], self.device)
        cache.begin_prefill(target_rows, source_prompts)
        return self._through_modules().prefill_with_images(ids, last, prompts, cache)

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: SampleState, rope_deltas: Tensor | None = None
    ) -> Tensor:
        """Runs one token in each of the first n rows, [n] int64 each; returns logits [n, vocab].

        The cache's decode phase must be begun. rope_deltas: [n], what a vision-language model adds to the positions to
        get its own.
        """
        return self._forward().decode(tokens, positions, cache, rope_deltas)

    def verify(self, vocab_size: int, cache: SampleState) -> SampleState:
        """Compares prefill and decoding with the plain model on a few tokens, once there are weights to compare with.

        Returns the kind of cache for the first forward that agrees.
        """
        return cache if self._verified is not None else self._choose_forward(vocab_size, cache)

    def _choose_forward(self, vocab_size: int, cache: SampleState) -> SampleState:
        """Chooses the first forward that agrees with the plain model, and returns the cache for it."""
        check = ForwardCheck(self.model, self._decoder, vocab_size)
        if not check.has_weights:
            return cache
        if self._fused is not None and check.agrees(self._fused, self.make_cache()):
            self._verified = self._fused = self._replaying(self._fused)
            return cache
        return self._fall_back_to_modules(check) or cache

    def _replaying(self, forward: Launched) -> Launched:
        # Kernels that are deterministic by request may wait for the device, which a graph cannot.
        can_replay = self.replays_steps and not torch.are_deterministic_algorithms_enabled()
        if can_replay and self.device.type == "cuda" and isinstance(forward, FusedForward):
            return ReplayedForward(forward)
        return forward

    def _fall_back_to_modules(self, check: ForwardCheck) -> SampleCaches | None:
        """Chooses the modules, or else generation with the model's own cache, which it then returns."""
        if self._fused is not None:
            logger.warning("The fused forward of %s differs from the model: not used.", type(self.model).__name__)
            self._fused = None
        try:
            modules = self._through_modules()
            if check.agrees(modules, self.make_cache()):
                self._verified = modules
                return None
        except Exception as error:  # a model that cannot use a RowCache fails in its own ways
            logger.debug("%s: %s", type(self.model).__name__, error)
        self._verified = find_forward(self.model, check.agrees)
        if self._verified is None:
            raise RuntimeError(check.objection())
        return SampleCaches()

    def _forward(self) -> Forward:
        return self._verified or self._through_modules()

    def _through_modules(self) -> ModuleForward:
        if self._modules is None:
            self._modules = self.make_modules(self.model, self._decoder)
        return self._modules


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the prompts as [prompts, longest], padded on the right, and the index of each last token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    return ids.to(device), torch.tensor([len(prompt) - 1 for prompt in prompts]).to(device)


# ---- The Llama family


class RMSNorm:
    """Computes x * weight / sqrt(mean(x^2) + eps), with a weight [dim] or several stacked to [heads, dim]."""

    def __init__(self, parameters: list[Tensor], eps: float) -> None:
        self.parameters, self.eps = parameters, eps
        self.by_parts = True  # on a CPU, with fewer operations, which round differently from rms_norm()
        self._root = math.sqrt(parameters[0].shape[0])
        self._floor = torch.tensor(self._root * math.sqrt(eps), device=parameters[0].device)
        self.refresh()

    def __call__(self, values: Tensor) -> Tensor:
        if not self._goes_by_parts:
            return F.rms_norm(values, values.shape[-1:], None, self.eps).mul_(self._weight)
        # On a CPU, rms_norm is a dozen small operations; this is x * (weight * sqrt(dim)) / sqrt(|x|^2 + dim * eps).
        wide = values.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * self._scaled).div_(length.hypot_(self._floor)).to(values.dtype)

    def refresh(self) -> None:
        """Reads the parameters again; call it after they changed."""
        first = self.parameters[0]
        if first.untyped_storage().nbytes() == 0:
            return  # freed while the engine sleeps: reading it would crash, and loading weights refreshes again
        self._weight = first if len(self.parameters) == 1 else torch.stack(self.parameters)
        self._goes_by_parts = self.by_parts and first.dtype != torch.float64 and first.device.type == "cpu"
        self._scaled = self._weight.float() * self._root


@dataclass(slots=True)
class _Layer:
    """The fused parts of one decoder layer."""

    index: int
    input_norm: RMSNorm
    qkv: FusedLinear
    head_norm: RMSNorm | None  # of queries and keys, per head
    output: FusedLinear
    mlp_norm: RMSNorm
    gate_up: FusedLinear
    down: FusedLinear
    window: int | None

    def parts(self) -> list[RMSNorm | FusedLinear]:
        """Returns all parts that are derived from parameters."""
        parts = (self.input_norm, self.qkv, self.head_norm, self.output, self.mlp_norm, self.gate_up, self.down)
        return [part for part in parts if part is not None]


class FusedForward:
    """Runs prompts, or one token per row, with the parameters of a model and the rows of a cache."""

    make_linear: Callable[[list[nn.Linear]], FusedLinear] = staticmethod(fused_linear)

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.body: Any = model.get_decoder()  # one of several classes
        self._head: Any = model.get_output_embeddings()
        attention = self.body.layers[0].self_attn
        self.dim: int = attention.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.scaling: float = attention.scaling
        self.last_norm = RMSNorm([self.body.norm.weight], config.rms_norm_eps)
        self.layers = [self._read_layer(index, layer, config) for index, layer in enumerate(self.body.layers)]
        packs_head = is_worth_packing(self._head.weight)
        self.score: Callable[[Tensor], Tensor] = PackedHead(self._head) if packs_head else self._head
        self._rope = torch.empty(0, 2, self.dim)
        self._windows = {layer.window for layer in self.layers}

    def refresh(self) -> None:
        """Recomputes the tensors derived from the parameters."""
        for part in self.parts():
            part.refresh()

    def parts(self) -> list[Any]:
        """Returns all that is derived from parameters."""
        heads = [self.score] if isinstance(self.score, PackedHead) else []
        return [self.last_norm, *heads, *(part for layer in self.layers for part in layer.parts())]

    def pack_with(self, make: Callable[[], PackedWeight]) -> None:
        """Packs all weights in another way, also those that would not be packed."""
        for layer in self.layers:
            layer.qkv, layer.output = layer.qkv.packed_as(make()), layer.output.packed_as(make())
            layer.gate_up, layer.down = layer.gate_up.packed_as(make()), layer.down.packed_as(make())
        self.score = PackedHead(self._head, make())

    def decode(self, tokens: Tensor, positions: Tensor, cache: RowCache, rope_deltas: Tensor | None = None) -> Tensor:
        """Returns logits [n, vocab] of tokens [n] at positions [n]; the decode phase must be begun."""
        phase, dtype = cache.decode_phase, self._head.weight.dtype
        masks = {window: phase.mask(window, self.num_kv_heads, dtype) for window in self._windows}
        grouped = (-1, self.num_heads // self.num_kv_heads, self.dim)

        def attend(layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.append(keys, values, layer.index)
            mixed = self.mix(queries.reshape(grouped), *cache.read(layer.index), masks[layer.window])
            return mixed.reshape(len(tokens), -1)

        chosen = attend if len(phase.parts) == 1 else self._attend_in_parts(cache, masks)
        return self._run(tokens, self.cos_sin(positions, cache.capacity), chosen)

    def _attend_in_parts(self, cache: RowCache, masks: dict[int | None, Tensor]) -> Callable[..., Tensor]:
        """Returns the attention for decode(), which reads each part of the rows up to its own length."""
        parts, num_kv_heads = cache.decode_phase.parts, self.num_kv_heads
        grouped = (-1, self.num_heads // num_kv_heads, self.dim)
        by_row = {window: mask.unflatten(0, (-1, num_kv_heads)) for window, mask in masks.items()}
        cut = {
            window: [mask[part.rows, ..., : part.num_read].flatten(0, 1) for part in parts]
            for window, mask in by_row.items()
        }

        def attend(layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.append(keys, values, layer.index)
            mixed = [
                self.mix(queries[part.rows].reshape(grouped), *cache.read(layer.index, index), mask)
                for index, (part, mask) in enumerate(zip(parts, cut[layer.window], strict=True))
            ]
            return torch.cat(mixed).reshape(len(queries), -1)

        return attend

    def prefill(self, ids: Tensor, last: Tensor, cache: RowCache) -> Tensor:
        """Returns logits [b, vocab] after index last[j] of each row of ids [b, t]; the prefill phase must be begun."""
        rows, width = ids.shape
        positions = torch.arange(width, device=ids.device)
        masks = {
            window: visible(width, width, window, ids.device) if window is not None and width > window else None
            for window in self._windows
        }

        def attend(layer: _Layer, *parts: Tensor) -> Tensor:
            queries, keys, values = (part.reshape(rows, width, -1, self.dim).transpose(1, 2) for part in parts)
            cache.store_prompts(keys, values, layer.index)
            return self.mix_prompts(layer, queries, keys, values, masks[layer.window]).reshape(rows * width, -1)

        kept = torch.arange(rows, device=ids.device) * width + last
        return self._run(ids.flatten(), self.cos_sin(positions.repeat(rows), cache.capacity), attend, kept)

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Returns the attention of queries [b, rows, dim] to keys [b, dim, n] and values [b, n, dim]."""
        scores = torch.baddbmm(mask, queries, keys, alpha=self.scaling)
        return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)

    def mix_prompts(self, layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the causal attention [b, t, heads, dim] of whole prompts, all [b, heads or kv_heads, t, dim]."""
        return grouped_attention(queries, keys, values, mask, self.scaling).transpose(1, 2)

    def _run(
        self, tokens: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[..., Tensor], kept: Tensor | None = None
    ) -> Tensor:
        """Returns logits [n, vocab] of tokens [n], or of those at the indices `kept`; `attend` mixes the values."""
        hidden = F.embedding(tokens, self.body.embed_tokens.weight)  # a copy: the layers add to it in place
        for layer in self.layers:
            mixed = attend(layer, *self._project(layer, layer.input_norm(hidden), rope))
            if kept is not None and layer is self.layers[-1]:  # the others are no longer needed
                hidden, mixed = hidden.index_select(0, kept), mixed.index_select(0, kept)
            layer.output.add_to(hidden, mixed)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, 1)
            layer.down.add_to(hidden, F.silu(gate).mul_(up))
        return self.score(self.last_norm(hidden))

    def _project(self, layer: _Layer, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries [n, heads, dim], rotated keys and values [n, kv_heads, dim]."""
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.dim
        projected = layer.qkv(hidden).view(-1, heads + 2 * kv_heads, dim)
        rotated, values = projected.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if layer.head_norm is not None:
            rotated = layer.head_norm(rotated)
        return *self.rotate(rotated, *rope), values

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rotated heads [n, heads + kv_heads, dim] as queries and keys."""
        # This is rotate_half(x) * sin, with the sign of the first half moved into the table.
        parts = (self.num_heads, self.num_kv_heads)  # added separately, so that the queries come out contiguous
        queries, keys = (heads * cos).split_with_sizes(parts, 1)
        other_queries, other_keys = heads.roll(self.dim // 2, -1).split_with_sizes(parts, 1)
        return torch.addcmul(queries, other_queries, sin), torch.addcmul(keys, other_keys, sin)

    def cos_sin(self, positions: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and signed sines of the positions, [n, 1, dim] each."""
        weight = self._head.weight
        if self._rope.shape[0] < capacity or self._rope.device != weight.device or self._rope.dtype != weight.dtype:
            tabulated = torch.arange(round_up(capacity, 256), device=weight.device)[None]
            cos, sin = self.body.rotary_emb(weight, tabulated)
            signed = torch.cat((-sin[0, :, : self.dim // 2], sin[0, :, self.dim // 2 :]), dim=-1)
            self._rope = torch.stack((cos[0], signed), dim=1)
        chosen = self._rope.index_select(0, positions)
        return chosen[:, :1], chosen[:, 1:]

    def _read_layer(self, index: int, module: Any, config: Any) -> _Layer:
        attention, mlp, eps = module.self_attn, module.mlp, config.rms_norm_eps
        head_norms = []
        if hasattr(attention, "q_norm"):
            head_norms = [attention.q_norm.weight] * self.num_heads + [attention.k_norm.weight] * self.num_kv_heads
        return _Layer(
            index=index,
            input_norm=RMSNorm([module.input_layernorm.weight], eps),
            qkv=self.make_linear([attention.q_proj, attention.k_proj, attention.v_proj]),
            head_norm=RMSNorm(head_norms, eps) if head_norms else None,
            output=self.make_linear([attention.o_proj]),
            mlp_norm=RMSNorm([module.post_attention_layernorm.weight], eps),
            gate_up=self.make_linear([mlp.gate_proj, mlp.up_proj]),
            down=self.make_linear([mlp.down_proj]),
            window=getattr(config if config.model_type == "mistral" else attention, "sliding_window", None),
        )


def is_supported(model: PreTrainedModel) -> bool:
    """Returns whether every part of the model is exactly what FusedForward computes."""
    if type(model).__name__ not in _FAMILIES or not type(model).__module__.startswith("transformers."):
        return False
    body: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    if model.config.hidden_act != "silu" or body.rotary_emb.rope_type not in _FIXED_ROPES:
        return False
    has_plain_head = type(head) is nn.Linear and head.bias is None
    return has_plain_head and all(_has_plain_linears(layer) for layer in body.layers)


def _has_plain_linears(layer: Any) -> bool:
    """Returns whether no weight is adapted or quantised, and all biases are such that the fused products add them."""
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    attention, mlp = layer.self_attn, layer.mlp
    without_bias = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    is_plain = len(linears) == 7 and all(type(linear) is nn.Linear for linear in linears)
    return is_plain and all(linear.bias is None for linear in without_bias)
