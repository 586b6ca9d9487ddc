"""The cores that a run may use: those that it is bound to, within the quota of its container."""

import os
import sys
from pathlib import Path

import pytest

from lightrl import cores
from lightrl.testing import run_program


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, int]:
    """The numbers of cores that torchrun and this rank are bound to, by pid; there is no quota."""
    numbers = {os.getppid(): 64, 0: 64}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(numbers[pid])), raising=False)
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    return numbers


def test_ranks_share_the_cores_of_their_job(bound: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert (cores.usable_cores(), cores.cores_of_rank()) == (64, 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (cores.usable_cores(), cores.cores_of_rank()) == (64, 8)
    bound[0] = 8  # torchrun binds each rank to its own part
    assert (cores.usable_cores(), cores.cores_of_rank()) == (64, 8)
    bound[0] = 1
    assert cores.cores_of_rank() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert cores.cores_of_rank() == 1


def test_without_torchrun_the_own_cores_count(bound: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    bound[0] = 4  # by taskset or srun, which leave the parent as it is
    assert cores.usable_cores() == 4


@pytest.mark.parametrize(
    ("content", "expected"), [("max 100000\n", 64), ("200000 100000\n", 2), ("50000 100000\n", 1), ("", 64)]
)
def test_the_quota_of_a_container_counts(bound: dict[int, int], content: str, expected: int) -> None:
    cores._QUOTA.write_text(content)
    assert cores.usable_cores() == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no process can be bound to cores")
def test_the_reward_code_starts_no_more_programs_than_the_job_has_cores(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n"
        "from lightrl.rewards.code_tests import CodeTests\n"
        "print('programs:', CodeTests(unsafe=True).max_concurrency)\n"
    )
    assert "programs: 1" in run_program([sys.executable, str(program)], timeout_s=100)
