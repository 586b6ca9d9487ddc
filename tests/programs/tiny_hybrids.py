"""Small random models of the families that cannot run whole packs, and what their own forward gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 98  # as in lightrl.testing.tiny_training
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
SHORT: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}


def _config(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**settings)


# By model type: those whose recurrent layers alone run a sequence at a time, then those that do so as a whole.
BY_MIXER: dict[str, Callable[[], Any]] = {
    "qwen3_next": _config("Qwen3NextConfig", **SHAPE, **MOE, **LINEAR, head_dim=8, shared_expert_intermediate_size=16),
    "qwen3_5_text": _config("Qwen3_5TextConfig", **SHAPE, **LINEAR, head_dim=8),
    "lfm2": _config("Lfm2Config", **SHAPE, layer_types=["conv", "full_attention"]),
    "falcon_h1": _config("FalconH1Config", **SHAPE, **MAMBA, mamba_d_ssm=64, head_dim=8),
    "granitemoehybrid": _config(
        "GraniteMoeHybridConfig",
        **SHAPE,
        **MAMBA,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
    "nemotron_h": _config(
        "NemotronHConfig",
        **{**SHAPE, "num_hidden_layers": 3},
        **ROUTED,
        layers_block_type=["mamba", "attention", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=8,
        head_dim=8,
        moe_shared_expert_intermediate_size=16,
    ),
    "jamba": _config(
        "JambaConfig",
        **SHAPE,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "bamba": _config("BambaConfig", **SHAPE, **MAMBA, attn_layer_indices=[1]),
    "zamba2": _config(
        "Zamba2Config",
        **{**SHAPE, **HEADS},
        layer_types=["linear_attention", "hybrid"],
        hybrid_layer_ids=[1],
        mamba_d_state=4,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=1,
        chunk_size=8,
        adapter_rank=4,
    ),
    "mamba": _config("MambaConfig", **SHORT, state_size=4),
    "mamba2": _config("Mamba2Config", **SHORT, state_size=4, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    "recurrent_gemma": _config(
        "RecurrentGemmaConfig",
        **SHAPE,
        block_types=["recurrent", "attention"],
        lru_width=32,
        attention_window_size=8,
        head_dim=8,
    ),
    "kimi_linear": _config(
        "KimiLinearConfig",
        **{**SHAPE, **HEADS},
        **LATENT,
        **{**MOE, "num_experts_per_token": 2},
        layer_types=["linear_attention", "full_attention"],
        linear_num_heads=4,
        linear_head_dim=8,
    ),
}
APART: dict[str, Callable[[], Any]] = {
    "rwkv": _config("RwkvConfig", **SHORT, attention_hidden_size=32, context_length=64),
    "bloom": _config("BloomConfig", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "falcon": _config("FalconConfig", **SHORT, num_attention_heads=4, new_decoder_architecture=True, num_kv_heads=2),
    "gptj": _config(
        "GPTJConfig",
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        rotary_dim=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama4_text": _config(
        "Llama4TextConfig",
        **SHAPE,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
    "minimax": _config(
        "MiniMaxConfig",
        **SHAPE,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "deepseek_v32": _config(
        "DeepseekV32Config",
        **{**SHAPE, **HEADS},
        **LATENT,
        **ROUTED,
        index_topk=6,
        index_n_heads=16,
        index_head_dim=16,
    ),
}
FAMILIES = BY_MIXER | APART


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Weights of 0.12: large enough that a mixed state shows, small enough for float32 to hold 1e-5."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        FAMILIES[family](), dtype=torch.float32, attn_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    return model.eval()


def own_logprobs(model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """Of a response, by the model's own forward of this sequence alone."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
