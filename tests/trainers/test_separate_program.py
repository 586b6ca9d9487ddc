"""Runs whose ranks are split into trainers and rollout ranks: the same numbers, resumed, and never stuck."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.testing import run_program, run_spmd

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
REPLAY = SCRIPT.with_name("replay.py")
Rows = list[dict[str, Any]]

REWARD = """
import os, signal
from pathlib import Path

CALLS = Path(__file__).with_suffix(".calls")

def odd(sample):
    CALLS.open("a").write("x")
    if CALLS.stat().st_size == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(sample.text[:1] in "13579")
"""


def rows(folder: Path) -> Rows:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    # The engine's logprobs differ in the last bit by what else is in its batch.
    keep_out = ("time/", "memory/", "tokens/per_second", "sync/gb", "mismatch/")
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(keep_out)} for line in lines
    ]


@pytest.mark.slow
def test_a_split_run_has_the_numbers_of_a_colocated_one_also_when_resumed(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [*toy_flags, "--eval.every", "2", "--eval.max_prompts", "6", "--checkpoint.every", "2"]
    together, apart = tmp_path / "together", tmp_path / "apart"
    run_program([sys.executable, str(SCRIPT), *flags, "--max_steps", "4", "--output_dir", str(together)], timeout_s=280)
    split = [*flags, "--rollout_ranks", "2", "--output_dir", str(apart)]
    for num_steps in ("2", "4"):
        said = run_spmd(SCRIPT, *split, "--max_steps", num_steps, world_size=3, timeout_s=280)
    assert "continuing after step 2" in said
    assert rows(apart) == rows(together)


@pytest.mark.slow
def test_a_run_that_generates_while_it_learns_can_be_repeated(toy_flags: list[str], tmp_path: Path) -> None:
    recorded, again = tmp_path / "recorded", tmp_path / "again"
    flags = [*toy_flags, "--max_steps", "8", "--rollout_ranks", "1", "--rollout.max_staleness", "1"]
    run_spmd(SCRIPT, *flags, "--output_dir", str(recorded), world_size=2, timeout_s=280)
    first = rows(recorded)
    assert max(row["rollout/staleness_max"] for row in first) == 1
    run_program([sys.executable, str(REPLAY), str(recorded), "--output_dir", str(again)], timeout_s=280)
    for one, other in zip(first, rows(again), strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        assert one["rollout/staleness"] == other["rollout/staleness"]
        assert math.isclose(one["loss"], other["loss"], rel_tol=1e-4, abs_tol=1e-5)
        assert math.isclose(one["grad_norm"], other["grad_norm"], rel_tol=1e-3)


@pytest.mark.slow
def test_a_rollout_rank_that_is_killed_ends_the_run_with_its_name(toy_flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(REWARD)
    reward = ["--reward", f"{tmp_path / 'deadly.py'}:odd", "--eval.every", "0"]
    flags = [*toy_flags, *reward, "--rollout_ranks", "1", "--output_dir", str(tmp_path / "run"), "--max_steps", "50"]
    said = run_spmd(SCRIPT, *flags, world_size=2, timeout_s=120, expect_failure=True)
    assert "rollout rank 0 is gone: the process has ended and posted no error" in said
