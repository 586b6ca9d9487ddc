"""One run at a time writes a folder: the second is refused, and what a dead one left is taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.checkpoint import CheckpointDirectory
from lightrl.comm import Comm
from lightrl.config import GRPOConfig
from lightrl.testing import run_spmd
from lightrl.testing.preloaded import Program, start
from lightrl.testing.spmd import SpmdError
from lightrl.trainers import run_folder
from lightrl.trainers.run_folder import RunFolder, disown, disown_all, open_folder, own

PROGRAM = Path(__file__).parents[1] / "programs" / "signalled_program.py"


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    yield
    disown_all()


def own_in_child(root: Path) -> None:
    run_folder._owned.clear()  # a forked child has a copy of what its parent owns, but no lock
    own(root)


def is_free(root: Path) -> bool:
    """Returns whether another process may own the folder."""
    check = multiprocessing.get_context("fork").Process(target=own_in_child, args=(root,))
    check.start()
    check.join()
    return check.exitcode == 0


def own_for_ever(root: Path) -> None:
    own(root)
    (root / "ready").touch()
    time.sleep(60)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Any]:
    """Another process that owns tmp_path / "run"."""
    process = multiprocessing.get_context("fork").Process(target=own_for_ever, args=(tmp_path / "run",), daemon=True)
    process.start()
    while not (tmp_path / "run" / "ready").exists():
        assert process.is_alive()
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_the_second_is_refused_until_the_first_is_dead(tmp_path: Path, owner: Any) -> None:
    root = tmp_path / "run"
    with pytest.raises(ValueError, match=f"is in use by process {owner.pid} on host {socket.gethostname()} since 20"):
        own(root)
    owner.kill()
    owner.join()
    assert json.loads((root / "owner.json").read_text())["pid"] == owner.pid  # a kill leaves the file
    own(root)
    assert json.loads((root / "owner.json").read_text())["pid"] == os.getpid()


def test_a_process_may_open_its_folder_again_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    own(root)
    RunFolder(root).check(GRPOConfig())  # owner.json alone is no run
    own(root)
    disown(tmp_path)  # not its folder
    assert root.exists()
    disown(root)
    assert list(tmp_path.iterdir()) == []
    own(root)
    (root / "config.yaml").touch()
    disown_all()
    assert [path.name for path in root.iterdir()] == ["config.yaml"]
    own(root)
    (root / "owner.json").unlink()  # by hand
    own(root)
    assert (root / "owner.json").exists()


def test_a_tilde_is_the_home_folder_where_no_shell_has_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder, _ = open_folder(GRPOConfig(output_dir="~/run"), "rollout", Comm())
    assert folder.root == tmp_path / "home" / "run"


def test_a_trainer_owns_the_folder_that_it_opens_and_finds_its_checkpoint(tmp_path: Path) -> None:
    config = GRPOConfig(output_dir=str(tmp_path / "run"))
    folder, checkpoint = open_folder(config, "rollout", Comm())
    assert not folder.root.exists()  # such a rank only generates
    folder, checkpoint = open_folder(config, "grpo", Comm())
    assert [path.name for path in folder.root.iterdir()] == ["owner.json"]
    assert checkpoint is None
    folder.open(config, 0)
    folder.append_metrics(1, {})
    directory = CheckpointDirectory(folder.checkpoints, keep=1)
    (directory.begin(1) / "file").write_text("x")
    written = directory.commit(1)
    assert open_folder(config, "grpo", Comm())[1] == written
    with pytest.raises(ValueError, match="belongs to another run: seed was 0, now 3"):
        open_folder(GRPOConfig(output_dir=str(tmp_path / "run"), seed=3), "grpo", Comm())


def test_a_trainer_that_is_refused_does_not_give_away_the_folder_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    folder, _ = open_folder(GRPOConfig(output_dir=str(root)), "grpo", Comm())
    monkeypatch.chdir(root)
    folder.open(GRPOConfig(output_dir=str(root)), 0)
    folder.append_metrics(1, {})
    for changes in ({"seed": 3}, {"resume": str(tmp_path / "missing")}):  # refused before it owns the folder, and after
        with pytest.raises(ValueError, match=r"belongs to another run|there is no such folder"):
            open_folder(GRPOConfig(output_dir=str(root), **changes), "grpo", Comm())
        assert not is_free(root)


def test_of_two_trainers_of_a_process_the_newer_has_the_folder(tmp_path: Path) -> None:
    config, link = GRPOConfig(output_dir=str(tmp_path / "run")), tmp_path / "link"
    older, _ = open_folder(config, "grpo", Comm())
    older.open(config, 0)
    link.symlink_to("run")
    newer, _ = open_folder(GRPOConfig(output_dir=str(link)), "grpo", Comm())  # the lock is the process's
    with pytest.raises(ValueError, match=f"--output_dir {older.root} belongs to a newer trainer of this process"):
        older.open(config, 0)
    newer.open(config, 0)
    disown(older.root, older.number)  # as the older trainer does when it closes
    assert not is_free(newer.root)
    disown(newer.root, newer.number)
    assert is_free(newer.root)


def test_a_forked_child_does_not_keep_the_folder(tmp_path: Path) -> None:
    """The worker of a reward may outlive a killed run for a while."""
    own(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        disown(tmp_path)
        check = multiprocessing.get_context("fork").Process(target=own, args=(tmp_path,))
        check.start()
        check.join()
        assert check.exitcode == 0
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, "is in use by process"),
        ({"started": 1}, None),  # the pid was given to another process since
        ({"pid": 2**22 + 1, "started": None}, None),  # above the largest pid of Linux: nobody's
        ({"host": "elsewhere"}, "in use by process [0-9]+ on host elsewhere .* knows no locks: if that run has ended"),
        ({"pid": "none"}, None),
    ],
)
def test_where_the_file_system_knows_no_locks_the_record_decides(
    changes: dict[str, Any], refusal: str | None, tmp_path: Path, owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    path = tmp_path / "run" / "owner.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            own(tmp_path / "run")
    else:
        own(tmp_path / "run")


def test_an_error_of_the_lock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "lockf", broken)
    with pytest.raises(OSError, match="Input/output error"):
        own(tmp_path)
    assert run_folder._owned == {}


@pytest.mark.slow
def test_of_two_runs_one_works_and_the_other_ends_with_2_on_every_rank(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [*toy_flags, "--eval.every", "0", "--max_steps", "100000", "--output_dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        first = start(Program(str(PROGRAM), flags, environment, str(tmp_path)), output)
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "run" / "metrics.jsonl").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            owner = json.loads((tmp_path / "run" / "owner.json").read_text())
            with pytest.raises(SpmdError, match=r"Exit code (2, 2|2, -15|-15, 2): ") as refused:
                run_spmd(PROGRAM, *flags, world_size=2, timeout_s=60)  # -15: was told to end while it ended
            assert f"is in use by process {owner['pid']} on host {owner['host']} since" in str(refused.value)
            assert "Traceback" not in str(refused.value)
            num_rows = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
            deadline = time.monotonic() + 60
            while len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) < num_rows + 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            first.kill_all()
            first.read_exit_code()
    going_on = [*flags, "--max_steps", "2"]
    assert "model:" in run_spmd(PROGRAM, *going_on, world_size=1, timeout_s=60)
    assert not (tmp_path / "run" / "owner.json").exists()


def test_ranks_that_were_started_with_other_options_are_refused(tmp_path: Path) -> None:
    program = PROGRAM.with_name("different_options_program.py")
    said = run_spmd(program, str(tmp_path / "run"), world_size=2, timeout_s=120, expect_failure=True)
    told = "The ranks have different options: --max_steps is 2 on rank 0 and 3 on rank 1; --eval.n is 1 on rank 0 and 2"
    assert told in " ".join(said.split())
    assert "--output_dir" not in said
    assert not (tmp_path / "run").exists()
