"""GRPO with a strategy that has the page's five methods alone: single's losses, on one rank and on two."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightrl.testing import run_program, run_spmd

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_grpo.py"
PROGRAMS = ROOT / "tests" / "programs"


def test_two_steps_of_grpo(toy_flags: list[str], metrics_of: Callable[[Path], Any], tmp_path: Path) -> None:
    flags = [*toy_flags, "--max_steps", "2", "--checkpoint.every", "1", "--output_dir"]
    page = ["--strategy", "page_strategy:PageStrategy"]
    run_program([sys.executable, str(SCRIPT), *flags, str(tmp_path / "single"), "--strategy", "single"], timeout_s=200)
    run_program([sys.executable, str(SCRIPT), *flags, str(tmp_path / "one"), *page], timeout_s=200, cwd=PROGRAMS)
    run_spmd(SCRIPT, *flags, str(tmp_path / "two"), *page, world_size=2, timeout_s=200, cwd=PROGRAMS)
    rows, *others = [metrics_of(tmp_path / name) for name in ("single", "one", "two")]
    assert [row["step"] for row in rows] == [1, 2]
    for other in others:
        for mine, yours in zip(rows, other, strict=True):
            for name in ("loss", "grad_norm", "entropy", "lr"):
                assert math.isclose(yours[name], mine[name], rel_tol=1e-5, abs_tol=1e-8), name
            assert yours["reward/mean"] == mine["reward/mean"]
