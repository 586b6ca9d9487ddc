"""Continues a stored checkpoint that an earlier version of lightrl wrote, and prints the numbers of two more updates.

    python tests/programs/old_checkpoint_program.py FOLDER STRATEGY          # or started on two ranks
    python tests/programs/old_checkpoint_program.py FOLDER STRATEGY --write  # how the stored ones were made

Policy and critic learn at a falling rate; the critic's body is still frozen when the checkpoint is written, and an
average of the policy's weights is kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lightrl.config import OptimConfig, StrategyOptions
from lightrl.models.critic import Critic, ValueHead
from lightrl.models.policy import Policy
from lightrl.strategy import StrategyBase, strategy_class
from lightrl.testing.tiny_training import VOCAB, loss_fn, my_batches, num_tokens, parameters

OPTIM = OptimConfig(schedule="linear", weight_decay=0.1)


def start(name: str, seed: int) -> tuple[StrategyBase, Any, Any]:
    options = StrategyOptions(exact_batches=True, lr=1e-2, critic_lr=2e-2, critic_warmup_steps=3, optim=OPTIM)
    strategy = strategy_class(name)(0, 1.0, 1, 1, options)
    strategy.setup_distributed()
    torch.manual_seed(seed)
    policy, body = (AutoModelForCausalLM.from_config(tiny_config()) for _ in range(2))
    (actor, *_), (critic, *_), _, _ = strategy.prepare_models_and_optimizers(
        Policy(policy), Critic(body.model, ValueHead(8)), None, None, None, 10
    )
    strategy.keep_average(actor, 0.5)
    return strategy, actor, critic


def tiny_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip


def train(strategy: StrategyBase, actor: Any, critic: Any, step: int) -> list[float]:
    """Loss, gradient norm and rate of an update of the policy, then of one of the critic."""
    batches = my_batches(strategy, step)
    results = [
        strategy.train_batch(batches, loss_fn, num_tokens, model=actor),
        strategy.train_batch(batches, lambda values, batch: values.values.square().mean(), num_tokens, model=critic),
    ]
    return [number for result in results for number in (result.loss, result.grad_norm, result.lr)]


def go_on(strategy: StrategyBase, actor: Any, critic: Any) -> dict[str, Any]:
    numbers = [train(strategy, actor, critic, step) for step in (2, 3)]
    with strategy.averaged_weights(actor):
        average = sum(float(value.double().square().sum()) for value in parameters(strategy, actor).values())
    return {"numbers": numbers, "average": average, "global_step": strategy.global_step}


def write(name: str, folder: Path) -> None:
    strategy, actor, critic = start(name, seed=0)
    for step in range(2):
        train(strategy, actor, critic, step)
    strategy.set_global_step(2)
    state = {"cursor": [1, 2], "name": "x"}
    strategy.save_ckpt(actor, str(folder), client_state=state, companions={"critic": critic})
    expected = go_on(strategy, actor, critic)
    if strategy.comm.is_main:
        (folder / "expected.json").write_text(json.dumps(expected, indent=1))


def read(name: str, folder: Path) -> None:
    strategy, actor, critic = start(name, seed=5)
    _, client_state = strategy.load_ckpt(actor, str(folder), companions={"critic": critic})
    assert client_state == {"cursor": [1, 2], "name": "x"}
    found = go_on(strategy, actor, critic)
    if strategy.comm.is_main:
        sys.stdout.write(json.dumps(found) + "\n")
    strategy.close()


if __name__ == "__main__":
    folder, name, *rest = sys.argv[1:]
    (write if rest else read)(name, Path(folder))
