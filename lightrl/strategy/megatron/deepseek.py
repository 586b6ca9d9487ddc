"""DeepSeek-V3 in a Megatron layout: latent attention, shared experts, and routers with a bias, in plain torch.

megatron-core's own layers of experts support shared experts and such routers. Its latent attention needs Transformer
Engine for packs, so this module replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightrl.comm import Comm
from lightrl.config import StrategyOptions
from lightrl.models.packed_attention import Scoring, packed_layout
from lightrl.strategy.layout.materialize import broadcast_buffers
from lightrl.strategy.megatron.modules import GateAndUp, Norm, Rows, rotate
from lightrl.strategy.megatron.packing import Pack
from lightrl.strategy.megatron.parts import Sizes

KIND = "deepseek_v3"
BIAS = "mlp.gate.e_score_correction_bias"  # name in a layer of transformers: a buffer, which is not trained


def refused_part(config: Any) -> str:
    """Names the first part of a config that the layers here do not support; empty if there is none."""
    chooses_groups = _chooses_groups(config)
    for is_there, name in (
        (config.num_experts_per_tok < 2, "routers that choose one expert"),
        (not config.norm_topk_prob, "routers whose weights are not normalized (norm_topk_prob False)"),
        (config.n_shared_experts < 1, "layers without a shared expert"),
        (config.first_k_dense_replace >= config.num_hidden_layers, "layers that are all dense"),
        (
            # transformers adds up a group's two best scores; megatron-core, as many as a token takes from each group.
            chooses_groups and config.num_experts_per_tok // config.topk_group != 2,
            f"routers that choose {config.num_experts_per_tok} experts of {config.topk_group} groups, which is not two "
            "a group,",
        ),
    ):
        if is_there:
            return name
    return ""


def check_sizes(sizes: Sizes) -> None:
    """Raises ValueError for a layout that would split what must stay whole here."""
    for option, size in (("--tp_size", sizes.tp), ("--megatron.cp_size", sizes.cp), ("--megatron.etp_size", sizes.etp)):
        if size > 1:
            raise ValueError(
                f"--strategy megatron does not split a {KIND} model by {option} {size}: its latent attention stays "
                "whole. Use --megatron.pp_size and --megatron.ep_size."
            )


def check_options(config: Any, options: StrategyOptions) -> None:
    """Raises ValueError for options that these layers do not support."""
    if config.model_type != KIND:
        return
    for is_asked, option, instead in (
        (options.dtype != "float32", f"--dtype {options.dtype}", "use --dtype float32"),
        (options.routing.replay, "--routing.replay True", "its dense layers have no routers: use --strategy fsdp"),
    ):
        if is_asked:
            raise ValueError(f"--strategy megatron does not take {option} with a {KIND} model yet: {instead}.")


def _chooses_groups(config: Any) -> bool:
    return bool(config.n_group and config.topk_group and config.topk_group < config.n_group)


def core_settings(config: Any) -> dict[str, Any]:
    """Returns the settings of megatron-core's config for these layers of experts."""
    settings: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
    }
    if _chooses_groups(config):
        settings |= {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return settings


def fit_layer(parts: Any, config: Any) -> None:
    """Puts the latent attention and the shared experts' projections into the specification of a layer."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts.self_attention = ModuleSpec(module=LatentAttention, params={"text": config})
    shared = getattr(parts.mlp.submodules, "shared_experts", None)
    if shared is not None:
        shared.submodules.linear_fc1, shared.submodules.linear_fc2 = GateAndUp, Rows


class LatentAttention(nn.Module):
    """Causal attention within each sequence of a pack, whose keys and values are expanded from a short latent."""

    def __init__(self, config: Any, *, text: Any, **ignored: Any) -> None:
        super().__init__()
        hidden, heads, rank = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
        self._sizes = [text.qk_nope_head_dim, text.qk_rope_head_dim]
        self._expanded = [text.qk_nope_head_dim, text.v_head_dim]
        self._heads, self._interleaves = heads, text.rope_interleave
        self._scale = _scale(text.rope_parameters, sum(self._sizes))
        width = heads * sum(self._sizes)
        self._has_latent_queries = text.q_lora_rank is not None
        if self._has_latent_queries:
            self.q_a_proj = _projection(hidden, text.q_lora_rank)
            self.q_a_layernorm = Norm(config, text.q_lora_rank)
            self.q_b_proj = _projection(text.q_lora_rank, width)
        else:  # the name that queries have in the other families
            self.linear_qkv = nn.ParameterDict({"q_weight": nn.Parameter(torch.empty(width, hidden))})
        self.kv_a_proj_with_mqa = _projection(hidden, rank + text.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(config, rank)
        self.kv_b_proj = _projection(rank, heads * sum(self._expanded))
        self.linear_proj = Rows(heads * text.v_head_dim, hidden, config=config)

    def forward(self, hidden: Tensor, **settings: Any) -> tuple[Tensor, None]:
        """Maps [T, 1, H] to [T, 1, H]."""
        pack: Pack = settings["packed_seq_params"].pack
        assert pack.angles is not None
        states = hidden[:, 0]
        plain, turned = self._queries(states).unflatten(-1, (self._heads, -1)).split(self._sizes, dim=-1)
        latent, key_turned = self.kv_a_proj_with_mqa(states).split(
            [self.kv_a_layernorm.weight.shape[0], self._sizes[1]], dim=-1
        )
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self._heads, -1))
        key, value = expanded.split(self._expanded, dim=-1)
        turned = self._rotated(turned, pack.angles)
        key_turned = self._rotated(key_turned[:, None], pack.angles).expand(-1, self._heads, -1)
        query, key = torch.cat([plain, turned], dim=-1), torch.cat([key, key_turned], dim=-1)
        scoring = Scoring(scale=self._scale, window=None, softcap=None, sinks=None)
        parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
        found = packed_layout(pack.cu_seqlens, hidden.device).attend(parts[0], parts[1], parts[2], scoring)
        output: tuple[Tensor, None] = self.linear_proj(found.reshape(hidden.shape[0], 1, -1))
        return output

    def _queries(self, states: Tensor) -> Tensor:
        if not self._has_latent_queries:
            return F.linear(states, self.linear_qkv["q_weight"])
        queries: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(states)))
        return queries

    def _rotated(self, states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        if self._interleaves:  # pairs that are rotated together are adjacent
            states = torch.cat([states[..., 0::2], states[..., 1::2]], dim=-1)
        return rotate(states, *angles)


def _scale(rope: dict[str, Any], size: int) -> float:
    """Returns the scale of the attention scores, which YaRN raises for longer contexts, as in transformers."""
    factor, all_dim = float(rope.get("factor") or 1.0), float(rope.get("mscale_all_dim") or 0.0)
    if rope.get("rope_type", "default") == "default" or not all_dim or factor <= 1.0:
        return float(size**-0.5)
    return float(size**-0.5 * (0.1 * all_dim * math.log(factor) + 1.0) ** 2)


def _projection(input_size: int, output_size: int) -> nn.Linear:
    return nn.Linear(input_size, output_size, bias=False)


def take_buffers(model: nn.Module, device: torch.device, comm: Comm) -> dict[str, Tensor]:
    """Returns rank 0's buffers by name if the model's routers have biases; nothing for any other model."""
    if not any(name.endswith(BIAS) for name, _ in model.named_buffers()):
        return {}
    broadcast_buffers(model, device, comm)
    return dict(model.named_buffers())


def give_buffers(model: nn.Module, stages: Iterable[Any], buffers: dict[str, Tensor]) -> None:
    """Puts buffers back into a placed model, and makes the routers of its stages read the same biases."""
    layers = {stage.first_layer + index: layer for stage in stages for index, layer in enumerate(stage.decoder.layers)}
    for name, buffer in buffers.items():
        path, _, own_name = name.rpartition(".")
        model.get_submodule(path)._buffers[own_name] = buffer
        layer: Any = layers.get(int(name.split("layers.")[1].split(".")[0])) if name.endswith(BIAS) else None
        if layer is not None:
            layer.mlp.router.expert_bias = buffer
