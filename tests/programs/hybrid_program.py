"""Trains models that run each sequence alone under each of the given strategies, with unequal packs; on every rank.

hybrid_program.py FOLDER "--strategy ddp" "--strategy fsdp" ...
Writes FOLDER/<index>.pt.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch
from tiny_hybrids import tiny_model

from lightrl.config import GRPOConfig, parse_config
from lightrl.models.policy import Policy, response_batch
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.testing.tiny_training import (
    Trained,
    adamw,
    loss_fn,
    make_batch,
    num_tokens,
    parameters,
    samples,
    trainable,
)

FAMILIES = ("qwen3_5_text", "gptj")  # recurrent layers apart; the whole decoder apart, its embedding not tied
STEPS = 2


def train(strategy: StrategyBase, family: str) -> Trained:
    """One micro-batch a rank; rank 0 has one sequence, so its layers run less often than those of others."""
    policy = strategy.prepare_model(Policy(tiny_model(family, seed=strategy.comm.rank)))
    strategy.register(policy, adamw(trainable(policy)))
    losses, norms = [], []
    for step in range(STEPS):
        everything, rank = samples(step), strategy.comm.rank
        mine = everything[:1] if rank == 0 else everything[1:]
        batch = make_batch(everything if strategy.comm.world == 1 else mine).to(strategy.device)
        result = strategy.train_batch([batch], loss_fn, num_tokens, model=policy)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    check_engine(strategy, policy)
    return Trained(losses, norms, parameters(strategy, policy))


def check_engine(strategy: StrategyBase, policy: Policy) -> None:
    """Trained weights reach the native engine, whose logprobs are then those of the trainer."""
    strategy.setup_inference_engine(None, "native", actor=policy)
    items = strategy.gather_and_generate(
        {"max_tokens": 6, "temperature": 0.8}, all_prompt_token_ids=[[5, 9, 33], [7 + strategy.comm.rank]]
    )
    pairs = [(item.prompt_token_ids, item.output_token_ids) for item in items]
    (scores,) = strategy.forward([response_batch(pairs, temperature=0.8).to(strategy.device)], model=policy)
    sampled = torch.tensor([value for item in items for value in item.logprobs])
    difference = (scores.logprobs.cpu() - sampled).abs().max().item()
    assert difference < 2e-5, (type(policy.hf).__name__, difference)
    assert strategy.engine is not None
    strategy.engine.close()
    strategy.serving.engine = None


def main() -> None:
    root, *commands = sys.argv[1:]
    for index, command in enumerate(commands):
        strategy = create_strategy(parse_config(GRPOConfig, shlex.split(command)))
        strategy.setup_distributed()
        strategy.max_norm = 1.0
        found = {family: train(strategy, family)._asdict() for family in FAMILIES}
        if strategy.comm.is_main:
            torch.save(found, Path(root) / f"{index}.pt")
    strategy.close()


if __name__ == "__main__":
    main()
