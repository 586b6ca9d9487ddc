"""A step in its parts: learn_from() is the composition of the public calls."""

from pathlib import Path

import pytest
from levels_program import compare

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[1] / "programs" / "levels_program.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_learn_from_equals_its_calls_to_the_last_bit(kind: str, toy: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert "equal" in run_spmd(PROGRAM, kind, str(toy), str(output), world_size=2, timeout_s=240)


def test_a_shared_backbone_scores_and_values_in_one_pass(toy: Path, tmp_path: Path) -> None:
    compare("ppo, shared", toy, tmp_path / "run", "single")
