"""Children that a user's code forks and that come back into lightrl."""

import os
from pathlib import Path

import pytest

from lightrl.forked import end_child
from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parent / "programs" / "forked_program.py"


def test_a_child_that_comes_back_ends_and_the_ranks_go_on() -> None:
    printed = run_spmd(PROGRAM, world_size=2, timeout_s=120)
    assert printed.count("DONE") == 2
    # Three ways, each with two children for each of four samples and one for a batch, and five other places.
    ended = printed.count("is a child that code of yours, such as a reward, has made by os.fork()")
    assert ended == 3 * (2 * 4 + 1) + 5


def test_a_child_is_told_how_to_end(capfd: pytest.CaptureFixture[str]) -> None:
    child = os.fork()
    if child == 0:
        end_child(os.getppid())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    told = capfd.readouterr().err
    assert f"Process {child} is a child" in told
    assert f"a second copy of process {os.getpid()}, which does go on. End such a child by os._exit()" in told
