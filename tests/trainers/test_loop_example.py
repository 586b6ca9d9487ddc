"""examples/loop.py: GRPO without a trainer class has the numbers of train_grpo.py, on any ranks, and learns."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.testing import run_spmd

ROOT = Path(__file__).resolve().parents[2]
LOOP = ROOT / "examples" / "loop.py"
SIZES = ("--num_prompts", "6", "--group_size", "4", "--seed", "3")


def steps_of(output: str) -> list[dict[str, float]]:
    rows = re.findall(r"step (\d+) reward (\S+) loss (\S+) grad_norm (\S+)", output)
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    return [dict(zip(("reward/mean", "loss", "grad_norm"), map(float, row[1:]), strict=True)) for row in rows]


@pytest.mark.slow
def test_the_first_step_has_the_numbers_of_train_grpo_on_one_rank_and_on_two(
    metrics_of: Callable[[Path], list[dict[str, Any]]], tmp_path: Path
) -> None:
    flags = [*SIZES, "--max_steps", "1", "--eval.every", "0", "--log.tensorboard", "False"]
    run_spmd(ROOT / "scripts/train_grpo.py", *flags, "--output_dir", str(tmp_path / "run"), world_size=1)
    (wanted,) = metrics_of(tmp_path / "run")
    assert wanted["grad_norm"] > 0  # some group has unequal rewards
    for world_size in (1, 2):
        step = steps_of(run_spmd(LOOP, "--max_steps", "1", *SIZES, world_size=world_size))[0]
        for name, value in step.items():
            assert value == pytest.approx(wanted[name], rel=1e-5, abs=1e-8), (world_size, name)


@pytest.mark.slow
def test_a_rank_may_have_no_prompt() -> None:
    flags = ["--max_steps", "2", "--num_prompts", "1", "--group_size", "16", "--seed", "2"]
    one, two = (steps_of(run_spmd(LOOP, *flags, world_size=world_size)) for world_size in (1, 2))
    assert one[1]["grad_norm"] > 0
    assert two == [pytest.approx(step, rel=1e-5, abs=1e-7) for step in one]


@pytest.mark.slow
def test_it_learns_the_built_in_task() -> None:
    rewards = [step["reward/mean"] for step in steps_of(run_spmd(LOOP, "--max_steps", "30", world_size=1))]
    assert sum(rewards[:2]) / 2 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.45  # 0.65 to 0.7 on two kinds of CPU


def test_it_is_short_and_uses_no_trainer() -> None:
    source = LOOP.read_text()
    assert len(source.splitlines()) <= 120
    assert "lightrl.trainers" not in source
