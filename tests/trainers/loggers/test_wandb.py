"""The real wandb, offline."""

import threading
from pathlib import Path

import pytest

from lightrl.trainers.loggers.attach import LoggedRun
from lightrl.trainers.loggers.wandb import WandbLogger

wandb = pytest.importorskip("wandb", reason='needs wandb: pip install "lightrl[wandb]"')


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2" * 6)
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))


def test_a_run_is_written_without_a_network(logged_run: LoggedRun) -> None:
    logger = WandbLogger(logged_run)
    for step in (0, 1):
        logger.log(step, {"reward/mean": 0.25 * step})
    logger.close()
    # What wandb does at the end of a process: its service writes the file behind the run's back until then.
    wandb.teardown()
    files = [path for path in logged_run.folder.rglob("*") if path.is_file()]
    written = b"".join(path.read_bytes() for path in files)
    assert any(path.suffix == ".wandb" and logged_run.id in path.name for path in files)
    assert b"reward/mean" in written
    assert b"hunter2" not in written


def test_steps_that_a_resumed_run_repeats_are_kept(logged_run: LoggedRun) -> None:
    """W&B compares a step with the last one that the run has, which its service knows of a continued run, too."""
    logger = WandbLogger(logged_run)
    for step, name in ((4, "before"), (5, "lost"), (4, "again")):
        logger.log(step, {f"reward/{name}": 0.25})
    logger.close()
    wandb.teardown()
    written = b"".join(path.read_bytes() for path in logged_run.folder.rglob("*.wandb"))
    assert all(f"reward/{name}".encode() in written for name in ("before", "lost", "again"))


def test_a_run_that_fails_has_its_last_steps(logged_run: LoggedRun) -> None:
    """The process may end right after fail(), without a call of close() and without the end of the interpreter."""
    logger = WandbLogger(logged_run)
    for step in range(3):
        logger.log(step, {f"reward/of_{step}": 0.25})
    told = threading.Thread(target=logger.fail, args=(KeyboardInterrupt(),))
    told.start()
    told.join()
    written = b"".join(path.read_bytes() for path in logged_run.folder.rglob("*.wandb"))
    assert all(f"reward/of_{step}".encode() in written for step in range(3))
    logger.close()  # as after a signal


def test_the_variables_of_wandb_count(logged_run: LoggedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    with monkeypatch.context() as patch:
        for name, value in (("NAME", "mine"), ("RUN_ID", "9876"), ("DIR", str(tmp_path / "scratch"))):
            patch.setenv(f"WANDB_{name}", value)
        logger = WandbLogger(logged_run)
        assert (logger._run.name, logger._run.id) == ("mine", "9876")
        assert Path(logger._run.dir).is_relative_to(tmp_path / "scratch")
        logger.close()
    again = WandbLogger(logged_run)  # none of them stays in the process
    assert (again._run.name, again._run.id) == (logged_run.name, logged_run.id)
    again.close()
