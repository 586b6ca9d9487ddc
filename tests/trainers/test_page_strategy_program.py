"""GRPO with a strategy that has the page's five methods alone: single's losses, on one rank and on two."""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


PAGE = (ROOT / "docs" / "adding_a_strategy.md").read_text()
OF_TORCH = "from lightrl.strategy.torch_native import TorchStrategy\n"


def checkpoints_of_the_page() -> dict[str, str]:
    """The two ways in which the page lets a strategy save, each as the end of a file with PageStrategy."""
    (own,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def save_ckpt" in block)
    (borrowed,) = re.findall(r"`(save_ckpt, load_ckpt = .*?)`", PAGE)
    head = "class Saving(PageStrategy):\n    "
    return {
        "own": f"{own}\n{head}save_ckpt, load_ckpt = save_ckpt, load_ckpt\n",
        "borrowed": OF_TORCH + head + borrowed,
    }


@pytest.mark.parametrize("way", ["own", "borrowed"])
def test_a_run_continues_from_the_checkpoints_of_the_page(
    way: str, toy_flags: list[str], metrics_of: Callable[[Path], Any], tmp_path: Path
) -> None:
    five_methods = (PROGRAMS / "page_strategy.py").read_text()
    (tmp_path / "saving.py").write_text(f"{five_methods}\n{checkpoints_of_the_page()[way]}")
    flags = [*toy_flags, "--checkpoint.every", "2", "--strategy", "saving:Saving", "--output_dir"]

    def run(folder: str, *options: str) -> str:
        command = [sys.executable, str(SCRIPT), *flags, str(tmp_path / folder), *options]
        return run_program(command, timeout_s=200, cwd=tmp_path)

    run("whole")
    run("cut", "--max_steps", "2")
    assert "continuing after step 2" in run("cut")
    whole, cut = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "cut")
    assert [row["step"] for row in cut] == [1, 2, 3]
    for name in ("loss", "grad_norm", "entropy", "reward/mean"):
        assert cut[2][name] == whole[2][name], name
