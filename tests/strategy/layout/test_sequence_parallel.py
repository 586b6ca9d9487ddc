"""Tokens split over ranks equal one process."""

from pathlib import Path

import pytest
from tiny_vlm import FAMILIES

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[2] / "programs" / "split_program.py"
IMAGES = PROGRAM.with_name("image_split_program.py")


def test_two_ranks_equal_one() -> None:
    """The exchange by hand; outputs and gradients of every model, also with fewer key-value heads than ranks."""
    run_spmd(PROGRAM, "--strategy", "fsdp", "--sp_size", "2", world_size=2, timeout_s=200)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_with_images_equal_one(family: str) -> None:
    """Outputs and gradients, those of the vision tower too, of whole sequences and of trees."""
    run_spmd(IMAGES, family, "--strategy", "fsdp", "--sp_size", "2", world_size=2, timeout_s=280)


@pytest.mark.slow
@pytest.mark.long
def test_four_ranks_of_both_kinds() -> None:
    run_spmd(PROGRAM, "--strategy", "fsdp", "--sp_size", "2", "--tp_size", "2", world_size=4, timeout_s=280)
