"""Small random mixtures of experts, one of each way to weigh experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

VOCAB, NUM_LAYERS, NUM_EXPERTS, TOP_K = 61, 2, 6, 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": TOP_K,
}
QWEN = {"moe_intermediate_size": 16, "num_experts": NUM_EXPERTS}
DEEPSEEK = {
    **{"n_routed_experts": NUM_EXPERTS, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 2, "q_lora_rank": 8},
    **{"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4},
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=NUM_EXPERTS),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SHAPE, **QWEN, shared_expert_intermediate_size=16),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **QWEN, head_dim=8, norm_topk_prob=True),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **SHAPE, **QWEN, shared_expert_intermediate_size=16, head_dim=8, layer_types=["full_attention"] * NUM_LAYERS
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SHAPE, num_experts=NUM_EXPERTS),
    "phimoe": lambda: transformers.PhimoeConfig(**SHAPE, num_local_experts=NUM_EXPERTS, router_jitter_noise=0.5),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE, num_local_experts=NUM_EXPERTS, head_dim=8, rope_parameters=None
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SHAPE, num_local_experts=NUM_EXPERTS),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SHAPE, **DEEPSEEK}, first_k_dense_replace=0),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(**SHAPE, num_local_experts=NUM_EXPERTS, head_dim=8),
    "hunyuan_v1_moe": lambda: transformers.HunYuanMoEV1Config(
        **SHAPE, num_experts=NUM_EXPERTS, moe_topk=TOP_K, head_dim=8
    ),
    "hy_v3": lambda: transformers.HYV3Config(
        **SHAPE, **QWEN, head_dim=8, mlp_layer_types=["sparse"] * NUM_LAYERS, router_scaling_factor=1.5
    ),
    "aria_text": lambda: transformers.AriaTextConfig(**SHAPE, moe_num_experts=NUM_EXPERTS, moe_topk=TOP_K),
}
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * NUM_LAYERS}
BIASED: dict[str, Callable[[], Any]] = {  # the biases of their routers are parameters
    "afmoe": lambda: transformers.AfmoeConfig(**SHAPE, **QWEN, **FULL, head_dim=8, num_dense_layers=0, route_scale=1.5),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **SHAPE, moe_num_experts=NUM_EXPERTS, moe_k=TOP_K, moe_intermediate_size=16, moe_layer_start_index=0
    ),
    "laguna": lambda: transformers.LagunaConfig(
        **SHAPE, **QWEN, **FULL, head_dim=8, shared_expert_intermediate_size=16, mlp_layer_types=["sparse"] * NUM_LAYERS
    ),
}
CONFIGS |= BIASED


def tiny_moe(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    result: PreTrainedModel = model.eval()
    return result


class ListedExperts(torch.nn.ModuleList):
    """Experts as layers of their own, each of which sees its tokens alone, as models from outside transformers may have
    them."""

    def __init__(self, config: Any) -> None:
        sizes = {"intermediate_size": config.moe_intermediate_size}
        super().__init__(Qwen3MoeMLP(config, **sizes) for _ in range(config.num_experts))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            rows, places = torch.where(chosen == number)
            found.index_add_(0, rows, expert(hidden[rows]) * weights[rows, places, None])
        return found


class ListedConfig(transformers.Qwen3MoeConfig):
    model_type = "listed_moe"  # else peft takes the experts for one tensor


class ListedMoe(transformers.Qwen3MoeForCausalLM):
    """A Qwen3-MoE whose experts can have adapters."""

    config_class = ListedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = ListedExperts(config)


def listed_moe() -> ListedMoe:
    transformers.AutoModelForCausalLM.register(ListedConfig, ListedMoe, exist_ok=True)
    torch.manual_seed(0)
    model = ListedMoe(ListedConfig(**SHAPE, **QWEN, head_dim=8))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()
