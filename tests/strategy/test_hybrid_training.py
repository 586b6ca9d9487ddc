"""Models that run each sequence of a pack alone, on ranks whose packs have different numbers of sequences."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import hybrid_program as program
import pytest
import torch
from tiny_hybrids import tiny_model

from lightrl.testing import SpmdError, run_program, run_spmd
from lightrl.testing.strategy_contract import compare
from lightrl.testing.tiny_training import Trained, adamw, padded_loss, samples, trainable

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs DeepSpeed: pip install "lightrl[deepspeed]"'
)


@cache
def plain_training(family: str) -> Trained:
    """Each sequence by the model's own forward, and torch's optimizer."""
    model: Any = tiny_model(family)
    optimizer = adamw(trainable(model))
    losses, norms = [], []
    for step in range(program.STEPS):
        counts = [len(item.sample.response_ids) for item in samples(step)]
        parts = [padded_loss(model, [item]) * count for item, count in zip(samples(step), counts, strict=True)]
        loss = torch.stack(parts).sum() / sum(counts)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trainable(model), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Trained(losses, norms, {name: item.detach() for name, item in model.named_parameters()})


def check(file: Path) -> None:
    found = torch.load(file, weights_only=True)
    for family in program.FAMILIES:
        compare(Trained(**found[family]), plain_training(family), is_adam=True)


def test_one_process_and_two_ranks(tmp_path: Path) -> None:
    run_program([program.sys.executable, program.__file__, str(tmp_path), "--strategy single"], timeout_s=200)
    check(tmp_path / "0.pt")
    commands = ["--strategy ddp", "--strategy fsdp --gradient_checkpointing True"]
    run_spmd(program.__file__, str(tmp_path), *commands, world_size=2, timeout_s=200)
    check(tmp_path / "0.pt")
    check(tmp_path / "1.pt")


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
def test_two_ranks_of_deepspeed(tmp_path: Path) -> None:
    command = "--strategy deepspeed --deepspeed.zero_stage"
    run_spmd(program.__file__, str(tmp_path), f"{command} 2", world_size=2, timeout_s=200)
    check(tmp_path / "0.pt")
    with pytest.raises(SpmdError, match="Use --deepspeed.zero_stage 2, or --strategy fsdp"):
        run_spmd(program.__file__, str(tmp_path), f"{command} 3", world_size=2, timeout_s=100)
