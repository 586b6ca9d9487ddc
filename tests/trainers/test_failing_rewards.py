"""Runs whose reward fails on some samples: they train on the others, alike on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.testing import run_spmd

TRAIN = Path(__file__).resolve().parents[2] / "scripts" / "train_grpo.py"
REWARD = """
import time

def picky(sample):
    if sample.sample_index == 1:
        raise ValueError("not this one")
    if sample.position == 2 and sample.sample_index == 3:
        time.sleep(600)
    return sum(character in "13579" for character in sample.text) / 8
"""
EQUAL = ("reward/mean", "reward/picky", "reward/length", "reward/failures", "reward/equal_groups", "tokens/response")


@pytest.mark.slow
def test_failed_samples_are_left_out_alike_on_any_world_size(
    toy_flags: list[str], tmp_path: Path, metrics_of: Callable[[Path], list[dict[str, Any]]]
) -> None:
    (tmp_path / "picky.py").write_text(REWARD)
    flags = [
        *toy_flags, "--reward", f"{tmp_path / 'picky.py'}:picky=2", "length=0.5", "--reward_args", "length.target=3",
        "--max_reward_failures", "5", "--reward_timeout_s", "0.5", "--max_steps", "2", "--eval.every", "0",
        "--log.tensorboard", "False", "--distributed.device", "cpu",
    ]  # fmt: skip
    rows = {}
    for world, strategy in ((1, "single"), (2, "fsdp")):
        out = tmp_path / strategy
        output = run_spmd(
            TRAIN, *flags, "--strategy", strategy, "--output_dir", str(out), world_size=world, timeout_s=200
        )
        rows[world] = metrics_of(out)
        assert "ValueError: not this one" in output
    for one, two in zip(rows[1], rows[2], strict=True):
        assert one["reward/failures"] == 5  # four prompts of four samples: one each, and one that hangs
        for name in EQUAL:
            assert one[name] == pytest.approx(two[name], rel=1e-12)
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-7)
