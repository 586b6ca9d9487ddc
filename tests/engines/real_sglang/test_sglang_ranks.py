"""On two ranks: one engine for both, and one for each in a real run."""

import json
from pathlib import Path

from lightrl.testing import run_spmd

PROGRAMS = Path(__file__).resolve().parents[2] / "programs"


def test_two_ranks_share_an_engine():
    output = run_spmd(PROGRAMS / "sglang_program.py", world_size=2, timeout_s=200, torchrun=True)
    assert output.count("all checked") == 2


def test_grpo_with_an_engine_on_each_rank(tmp_path):
    arguments = ["--strategy", "fsdp", "--engine", "sglang", "--max_steps", "3", "--output_dir", str(tmp_path / "run")]
    arguments += ["--num_prompts", "4", "--group_size", "4", "--temperature", "0.7", "--eval.max_prompts", "8"]
    run_spmd(PROGRAMS / "fast_grpo_program.py", *arguments, world_size=2, timeout_s=220, torchrun=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    mismatches = [step["mismatch/max_abs"] for step in map(json.loads, lines) if "mismatch/max_abs" in step]
    assert len(mismatches) == 3
    assert max(mismatches) < 2e-5
