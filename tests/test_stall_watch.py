"""A rank that stops, or whose interpreter is held, is named with its phase and stack, and leaves nothing behind."""

import os
import time
from pathlib import Path

import pytest

from lightrl import process_group, stall_watch
from lightrl.rank_board import RankBoard
from lightrl.stall_watch import StallWatch
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
    output = stalled_run(stalled, tmp_path)
    rank = stalled[0]
    assert output.count("did not come") == 1
    assert f"rank {rank} did not come: in phase {phase!r} since " in output
    assert state in output
    assert "in stall_here" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stalled", "error"), [("1 generate raise", "ZeroDivisionError: planted"), ("1 backward leave", "SystemExit: 0")]
)
def test_an_error_of_one_rank_ends_all_with_its_traceback(stalled: str, error: str, tmp_path: Path) -> None:
    output = stalled_run(stalled, tmp_path)
    assert f"[rank 0] rank 1 failed in phase '{'learn' if 'backward' in stalled else 'generate'}'" in output
    assert error in output
    assert "did not come" not in output


class LostStore:
    """A store whose host is gone."""

    def clone(self) -> "LostStore":
        return self

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str) -> bytes:
        raise RuntimeError("Connection reset by peer")

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


class SharedStore:
    """The store of all ranks, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def clone(self) -> "SharedStore":
        return self

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.mark.parametrize("role", ["", "trainer"])
def test_ranks_that_wait_for_their_gpus_report_before_torch_ends_them(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_group, "_role", role)
    ended: list[int] = []
    monkeypatch.setattr(stall_watch, "_end", ended.append)
    monkeypatch.setattr(stall_watch, "_POLL_S", 0.02)
    monkeypatch.setattr(stall_watch, "_SKEW_S", 0.3)
    store = SharedStore()
    boards = [RankBoard(store, rank, 3) for rank in range(3)]
    for board, phase in zip(boards, ("learn", "learn", "reward"), strict=True):
        board.enter(phase)
    errors = ["TIMEOUT", "", ""]  # rank 1 came to the collective a moment later
    watches = [StallWatch(store, boards[rank], rank, 3, lambda rank=rank: errors[rank]) for rank in range(3)]
    time.sleep(0.1)
    assert not ended
    errors[1] = "TIMEOUT"
    deadline = time.monotonic() + 20
    while len(ended) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    report = capsys.readouterr().err
    assert ended == [1, 1, 1]
    assert "rank 0 waited for its GPU in phase 'learn': NCCL gave up a collective (TIMEOUT)" in report
    assert report.count("did not come") == 1
    assert f"\n{role} rank 2 did not come: in phase 'reward' since ".replace("\n ", "\n") in report
    assert f"{role} rank 1 waited too, in phase 'learn' since ".lstrip() in report
    for watch in watches:
        watch.stop()


def test_a_rank_that_ends_before_its_report_is_not_taken_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    waits: list[float] = []
    monkeypatch.setattr(stall_watch, "_end", ended.append)
    monkeypatch.setattr(stall_watch, "_POLL_S", 60)
    store = SharedStore()
    watch = StallWatch(store, RankBoard(store, 0, 2), 0, 2)
    monkeypatch.setattr(watch, "_wait_for", lambda keys, seconds: waits.append(seconds))
    store.values[stall_watch._ASKED] = "1"  # by rank 1, which is gone
    assert "the rank that asked first says for which" in watch.why_lost("timed out")
    assert waits == [stall_watch._WAIT_S]
    assert waits[0] + 2 < stall_watch._REPORT_S  # 1 s went by before, in which an error would have come
    watch.stop()
    assert ended == []


def test_a_store_that_goes_before_anybody_asks_ends_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(stall_watch, "_end", ended.append)
    store = LostStore()
    watch = StallWatch(store, RankBoard(store, 0, 2), 0, 2)
    watch._thread.join(10)
    assert not watch._thread.is_alive()
    watch.stop()
    assert ended == []
