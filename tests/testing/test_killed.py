"""Ranks that get a signal: what became of them, and how long it took."""

import signal
from pathlib import Path

import pytest

from lightrl.testing.killed import Ending, Launcher, run_and_signal

PROGRAM = """
import os, sys, time
rank = os.environ["RANK"]
open(sys.argv[1] + rank, "w").close()
time.sleep(0 if sys.argv[2:] else 60)
print("ended by itself")
"""


def run(folder: Path, launcher: Launcher, *args: str) -> Ending:
    program, mark = folder / "program.py", folder / "rank"
    program.write_text(PROGRAM)
    return run_and_signal(
        program, str(mark), *args, world_size=2, victims=[1], signum=signal.SIGKILL,
        when=lambda _: not args and len(list(folder.glob("rank?"))) == 2, timeout_s=60,
        end_timeout_s=1.5 if launcher == "nobody" else 30,
        launcher=launcher,
    )  # fmt: skip


def test_the_others_end_as_under_torchrun(tmp_path: Path) -> None:
    ending = run(tmp_path, "forked")
    assert (ending.was_signalled, ending.codes) == (True, (-15, -9))


def test_without_a_launcher_the_others_go_on(tmp_path: Path) -> None:
    ending = run(tmp_path, "nobody")
    assert (ending.is_late, ending.codes) == (True, (None,))
    ended = run(tmp_path, "nobody", "at once")
    assert (ended.was_signalled, ended.codes, ended.said) == (False, (0, 0), "ended by itself\n" * 2)


@pytest.mark.slow
def test_torchrun_ends_the_others(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ending = run_and_signal(
        program, str(tmp_path / "rank"), world_size=2, victims=[1], signum=signal.SIGKILL,
        when=lambda _: len(list(tmp_path.glob("rank?"))) == 2, timeout_s=60, launcher="torchrun",
    )  # fmt: skip
    assert (ending.was_signalled, ending.codes) == (True, (1,))
    assert "exitcode  : -9" in ending.said
