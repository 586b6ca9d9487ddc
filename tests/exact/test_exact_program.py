"""A whole run with --exact has one hash, also if it stops half-way and goes on spread in another way."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from lightrl.testing import run_program, run_spmd

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
FLAGS = [
    "--exact", "True", "--num_prompts", "6", "--group_size", "4", "--eval.every", "0", "--max_steps", "4",
    "--checkpoint.every", "2", "--num_minibatches", "2", "--num_epochs", "2", "--algorithm.kl_coef", "0.01",
    "--exact_tile_tokens", "32",  # a dozen samples of an update make several tiles
]  # fmt: skip
VARYING = ("time/", "memory/", "tokens/per_second", "sync/")


def weights(run: Path) -> str:
    return (run / "final" / "weights.sha256").read_text()


def metrics(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if not name.startswith(VARYING)} for line in lines]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_goes_on_with_other_ranks_and_strategy_has_the_same_hash(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    one = [*FLAGS, "--strategy", "single"]
    run_program([sys.executable, str(SCRIPT), *one, "--output_dir", str(whole)], timeout_s=280)
    shutil.copytree(whole, moved, ignore=shutil.ignore_patterns("final", "step-000004", "latest"))
    three = [*FLAGS, "--strategy", "fsdp", "--micro_batch_size", "1", "--output_dir", str(moved)]
    said = run_spmd(SCRIPT, *three, world_size=3, timeout_s=280)
    assert "continuing after step 2" in said
    assert weights(moved) == weights(whole)
    assert metrics(moved) == metrics(whole)
    assert all(row["mismatch/max_abs"] == 0 for row in metrics(whole) if "loss" in row)
