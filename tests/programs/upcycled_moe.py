"""Makes a mixture of experts of the built-in model: every expert begins as its MLP with noise of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightrl.builtin.model import builtin_model_path

NUM_EXPERTS, TOP_K = 4, 2


def write_upcycled(folder: Path, *, noise: float, near_ties: bool) -> Path:
    """Writes the folder of a Qwen3-MoE that solves as much as the built-in model.

    noise: of the experts' weights, relative to their size; what makes it matter which expert a token takes.
    near_ties: the logits of a token's experts differ by little more than float32 rounds, so that two programs that
        round differently choose differently now and then.
    """
    source = builtin_model_path()
    dense: Any = AutoModelForCausalLM.from_pretrained(source)
    kept = {key: value for key, value in dense.config.to_dict().items() if key not in ("model_type", "architectures")}
    config = Qwen3MoeConfig(**kept)
    config.num_experts, config.num_experts_per_tok, config.norm_topk_prob = NUM_EXPERTS, TOP_K, True
    config.moe_intermediate_size, config.decoder_sparse_step, config.mlp_only_layers = config.intermediate_size, 1, []
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config)
    _, unknown = model.load_state_dict(dense.state_dict(), strict=False)
    assert all(".mlp." in name for name in unknown), unknown

    def spread(weight: torch.Tensor) -> torch.Tensor:
        return weight + noise * weight.std() * torch.randn(NUM_EXPERTS, *weight.shape)

    with torch.no_grad():
        for made, layer in zip(model.model.layers, dense.model.layers, strict=True):
            mlp = layer.mlp
            made.mlp.experts.gate_up_proj.copy_(spread(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])))
            made.mlp.experts.down_proj.copy_(spread(mlp.down_proj.weight))
            router = torch.randn_like(made.mlp.gate.weight)
            made.mlp.gate.weight.copy_(router[:1] + 1e-5 * router if near_ties else router)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder
