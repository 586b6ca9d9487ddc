"""Trains a model of eight layers on as many micro-batches as there are stages, and on twice as many.

    chunks_ranks.py FILE FLAG...

Rank 0 writes the losses, norms and log-probabilities. The same program with `--strategy single` on one rank is what
stages of chunks are compared with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from lightrl.config import GRPOConfig, parse_config
from lightrl.models.policy import Policy
from lightrl.strategy import create_strategy
from lightrl.testing.tiny_training import VOCAB, adamw, loss_fn, make_batch, num_tokens, samples

STAGES = 4


def deep_policy() -> Policy:
    """Builds a random Qwen3 of two layers for each of the four stages."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 36, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, **heads, num_hidden_layers=2 * STAGES, tie_word_embeddings=True)
    return Policy(AutoModelForCausalLM.from_config(config))


def main() -> None:
    path, *flags = sys.argv[1:]
    strategy: Any = create_strategy(parse_config(GRPOConfig, flags))
    strategy.setup_distributed()
    strategy.max_norm = 1.0
    comm = strategy.comm
    policy, _ = strategy.prepare((policy := deep_policy(), adamw(policy.parameters())))
    found: dict[str, Any] = {"steps": [], "logprobs": []}
    for step, count in enumerate((STAGES, 2 * STAGES, STAGES)):
        batches = [make_batch([sample]).to(strategy.device) for sample in samples(step, count)]
        result = strategy.train_batch(batches[comm.rank :: comm.world], loss_fn, num_tokens)
        found["steps"].append([result.loss, result.grad_norm])
        scores: list[Tensor] = [outputs.logprobs for outputs in strategy.forward(batches[:1], model=policy)]
        found["logprobs"].append(scores[0].tolist())
    if comm.is_main:
        Path(path).write_text(json.dumps(found))
    strategy.close()


if __name__ == "__main__":
    main()
