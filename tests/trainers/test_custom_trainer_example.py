"""examples/custom_trainer.py: a trainer in one file runs on any ranks and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "custom_trainer.py"
ReadMetrics = Callable[[Path], list[dict[str, Any]]]


@pytest.mark.slow
def test_a_run_is_the_same_on_two_ranks_and_after_a_resume(
    toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    flags = [*toy_flags, "--eval.every", "0", "--log.tensorboard", "False", "--checkpoint.every", "2"]
    flags += ["--temperature", "0.7"]
    run_spmd(PROGRAM, *flags, "--output_dir", str(tmp_path / "one"), world_size=1)
    two = [*flags, "--output_dir", str(tmp_path / "two")]
    run_spmd(PROGRAM, *two, "--max_steps", "2", world_size=2)
    assert "continuing after step 2" in run_spmd(PROGRAM, *two, world_size=2)
    one, other = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert [row["step"] for row in one] == [row["step"] for row in other] == [1, 2, 3]
    for mine, yours in zip(one, other, strict=True):
        assert mine["reward/mean"] == yours["reward/mean"]
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(yours[name], rel=1e-5, abs=1e-8)
        assert mine["mismatch/max_abs"] < 1e-4  # samples and loss are at the temperature of the options
    assert one[0]["loss"] != one[-1]["loss"]


def test_an_evaluation_has_the_samples_that_the_options_ask_for(
    toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    flags = [*toy_flags, "--max_steps", "0", "--eval_data", toy_flags[3], "--eval.n", "2", "--eval.k", "2"]
    run_spmd(PROGRAM, *flags, "--output_dir", str(tmp_path / "run"), world_size=1)
    assert "eval/pass@2" in metrics_of(tmp_path / "run")[0]
