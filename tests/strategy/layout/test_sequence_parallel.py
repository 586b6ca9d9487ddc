"""Tokens split over ranks equal one process."""

from pathlib import Path

import pytest

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[2] / "programs" / "split_program.py"


def test_two_ranks_equal_one() -> None:
    """The exchange by hand; outputs and gradients of every model, also with fewer key-value heads than ranks."""
    run_spmd(PROGRAM, "--strategy", "fsdp", "--sp_size", "2", world_size=2, timeout_s=200)


@pytest.mark.slow
@pytest.mark.long
def test_four_ranks_of_both_kinds() -> None:
    run_spmd(PROGRAM, "--strategy", "fsdp", "--sp_size", "2", "--tp_size", "2", world_size=4, timeout_s=280)
