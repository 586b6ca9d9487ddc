"""Trains on dictionaries of padded rows, and by a Megatron schedule; rank 0 writes what both gave.

    rows_ranks.py FILE FLAG...

The same program with `--strategy single` on one rank is what a layout is compared with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrl.config import GRPOConfig, parse_config
from lightrl.models.lazy_logits import gather_logprobs
from lightrl.strategy import create_strategy
from lightrl.strategy.user_batch import next_token
from lightrl.testing.tiny_training import adamw, tiny_policy


def rows() -> dict[str, Tensor]:
    """Six rows of 3 to 8 tokens, padded to the left."""
    ids = torch.randint(1, 90, (6, 8), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(8) >= torch.tensor([5, 4, 3, 2, 1, 0])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "reward": torch.arange(6.0)}


def logits_loss(logits: Any, data: dict[str, Tensor]) -> Tensor:
    """Mean of the negative log-probabilities of all tokens but the first."""
    return -gather_logprobs(logits, next_token(data, "input_ids"), 0.7).sum() / weight(data)


def weight(data: dict[str, Tensor]) -> float:
    return float(data["input_ids"].shape[0] - (len(data["cu_seqlens"]) - 1))


def score_loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return -(outputs["log_probs"] * batch["attention_mask"]).mean() + 0.1 * outputs["entropy"].mean()


def run_steps(strategy: Any, policy: Any, optimizer: Any) -> list[float]:
    """Runs two micro-batches of rows by the schedule of the layout, and returns the norm of their mean's gradient."""
    halves = [{name: value[part] for name, value in rows().items()} for part in (slice(0, 3), slice(3, 6))]
    step = strategy.get_forward_step_func(score_loss)
    (micro_batches,) = strategy.make_data_iterator_list(iter(halves))
    if hasattr(strategy, "ranks"):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from lightrl.strategy.megatron.placing import placed_of

        schedule: Any = get_forward_backward_func()
        found = schedule(
            forward_step_func=step,
            data_iterator=micro_batches,
            model=[*placed_of(policy).stages],
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        losses = strategy.comm.all_gather_object([float(numbers["loss"]) for numbers in found])
        losses = next(part for part in losses if part)
    else:
        losses = []
        for _ in halves:
            outputs, finish = step(micro_batches, policy)
            loss, numbers = finish(outputs)
            losses.append(float(numbers["loss"]))
            strategy.backward(loss, policy, optimizer, weight=0.5)
    return [*losses, strategy.optimizer_step(optimizer, policy, None).grad_norm]


def main() -> None:
    path, *flags = sys.argv[1:]
    strategy: Any = create_strategy(parse_config(GRPOConfig, flags))
    strategy.setup_distributed()
    policy = tiny_policy()
    policy, optimizer = strategy.prepare((policy, adamw(policy.parameters())))
    comm = strategy.comm
    own = {name: value[comm.rank :: comm.world] for name, value in rows().items()}
    found: dict[str, Any] = {"train": [], "eval": strategy.eval_batch(own, logits_loss, weight)}
    found["scores"] = strategy.forward(rows()).tolist()
    for _ in range(3):
        result = strategy.train_batch(own, logits_loss, weight)
        found["train"].append([result.loss, result.grad_norm])
    found["steps"] = run_steps(strategy, policy, optimizer)
    if comm.is_main:
        Path(path).write_text(json.dumps(found))
    strategy.close()


if __name__ == "__main__":
    main()
