"""Makes small models, engines of the real SGLang, and the reference logprobs of Hugging Face."""

from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from lightrl.config import StrategyOptions

OPTIONS = StrategyOptions(engine_mem_fraction=0.2, seed=5)
SHAPE = {
    "vocab_size": 98,  # no multiple of what SGLang pads a vocabulary to
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def tiny(kind="tied", seed=0):
    """Peaked distributions, so that a wrong weight shows in a logprob."""
    torch.manual_seed(seed)
    config = {
        "tied": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
        "untied": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=False),
        "moe": lambda: Qwen3MoeConfig(**SHAPE, **MOE, tie_word_embeddings=False),
    }[kind]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = [2, 3]  # the second stands in no file that SGLang reads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(4 * parameter if parameter.dim() > 1 else parameter + 0.3 * torch.rand_like(parameter))
    return model.eval()


def perturb(model, seed, scale=0.05):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(scale * torch.randn(parameter.shape, generator=draw))


def pairs(model):
    return sorted((name, parameter.detach()) for name, parameter in model.named_parameters())


@contextmanager
def started(model, **options):
    from sabotaged_loader import load_bucket

    from lightrl.engines.base import create_engine
    from lightrl.engines.sglang.engine import SGLangEngine

    SGLangEngine.loader = f"{load_bucket.__module__}.{load_bucket.__name__}"
    engine = create_engine(
        "sglang", source=model, tokenizer=None, options=replace(OPTIONS, **options), device=torch.device("cpu")
    )
    try:
        yield engine
    finally:
        engine.close()


def hf_logprobs(model, completion, temperature=1.0, cut=None, **media):
    ids = torch.tensor([[*completion.prompt_token_ids, *completion.output_token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **media).logits[0, len(completion.prompt_token_ids) - 1 : -1]
    scores = logits.float() / temperature
    if cut is not None:
        scores = cut(scores)
    return scores.log_softmax(-1).gather(1, torch.tensor(completion.output_token_ids)[:, None])[:, 0]


def largest_difference(model, completions, temperature=1.0, cut=None, **media):
    return max(
        float((hf_logprobs(model, item, temperature, cut, **media) - torch.tensor(item.logprobs)).abs().max())
        for item in completions
    )
