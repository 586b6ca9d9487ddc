"""A run with --exact, top-p and top-k has one hash, and the engine's logprobs are the trainer's."""

import json
import sys
from pathlib import Path

import pytest

from lightrl.testing import run_program, run_spmd

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
FLAGS = [
    "--exact", "True", "--num_prompts", "6", "--group_size", "4", "--eval.every", "0", "--max_steps", "2",
    "--num_minibatches", "2", "--num_epochs", "2", "--algorithm.kl_coef", "0.01", "--exact_tile_tokens", "32",
    "--top_p", "0.9", "--top_k", "8", "--temperature", "0.8", "--log.tensorboard", "False",
]  # fmt: skip
VARYING = ("time/", "memory/", "tokens/per_second", "sync/")


def result(run: Path) -> tuple[str, list[dict[str, float]]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if not name.startswith(VARYING)} for line in lines]
    return (run / "final" / "weights.sha256").read_text(), kept


@pytest.mark.slow
@pytest.mark.long
def test_samples_are_trained_with_the_bits_they_were_drawn_with(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_program([sys.executable, str(SCRIPT), *FLAGS, "--strategy", "single", "--output_dir", str(one)], timeout_s=280)
    spread = ["--strategy", "fsdp", "--algorithm.old_logprobs", "engine", "--output_dir", str(two)]
    run_spmd(SCRIPT, *FLAGS, *spread, world_size=2, timeout_s=280)
    assert result(two) == result(one)
    assert all(row["mismatch/max_abs"] == 0 for row in result(one)[1])
