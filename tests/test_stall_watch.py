"""A rank that stops, or whose interpreter is held, is named with its phase and stack, and leaves nothing behind."""

import os
import tempfile
from pathlib import Path

import pytest

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parent / "programs" / "stalled_program.py"
FLAGS = ["--num_prompts", "2", "--group_size", "2", "--max_steps", "3", "--checkpoint.every", "1", "--eval.every", "0"]
FLAGS += ["--log.tensorboard", "False", "--strategy", "fsdp", "--reward_timeout_s", "0", "--distributed.timeout_s", "8"]


def stalled_run(stalled: str, folder: Path) -> str:
    """Returns what the ranks said; none of them is left."""
    command = [*FLAGS, "--output_dir", str(folder / "run")]
    output = run_spmd(PROGRAM, *command, world_size=2, timeout_s=120, env={"STALLED": stalled}, expect_failure=True)
    pids = [path.read_text() for path in folder.glob("run.pid*")]
    assert len(pids) == 2
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stalled", "phase", "state"),
    [
        ("1 backward stop", "learn", "was stopped by a signal (SIGSTOP) and was killed"),
        ("0 reward sleep", "reward exact_match", "is running"),
    ],
)
def test_one_report_names_the_rank_its_phase_and_its_stack(
    stalled: str, phase: str, state: str, tmp_path: Path
) -> None:
    shared = set(os.listdir("/dev/shm"))
    temporary = set(os.listdir(tempfile.gettempdir()))
    output = stalled_run(stalled, tmp_path)
    rank = stalled[0]
    assert output.count("did not come") == 1
    assert f"rank {rank} did not come: in phase {phase!r} since " in output
    assert state in output
    assert "in stall_here" in output
    assert set(os.listdir("/dev/shm")) <= shared
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - temporary if "torchelastic" in name]


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all_with_its_traceback(tmp_path: Path) -> None:
    output = stalled_run("1 generate raise", tmp_path)
    assert "ZeroDivisionError: planted" in output
    assert "did not come" not in output
