import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "gemma2": lambda: Gemma2Config(
        **SHAPE, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=6),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, rope_parameters=None
    ),
}


def _tiny_model(family: str, seed: int = 0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # peaked distributions and uneven norms, so that a wrong logit shows
            parameter.copy_(4 * parameter if parameter.dim() > 1 else parameter + torch.rand_like(parameter))
    return model.eval()


@pytest.fixture
def tiny_model():
    """A random model of a family in fp32; one seed gives one set of weights."""
    return _tiny_model
