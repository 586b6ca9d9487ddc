"""The real wandb, offline."""

import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

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


def test_the_rows_of_a_continued_offline_run_follow_those_before(logged_run: LoggedRun) -> None:
    numbers: list[list[int]] = []
    for done in (0, 2):
        logger = WandbLogger(replace(logged_run, step=done))
        for step in (done + 1, done + 2):
            logger.log(step, {"reward/mean": 0.25 * step})
        logger.close()
        wandb.teardown()
        newest = max(logged_run.folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        numbers.append(row_numbers(newest))
    assert numbers == [[0, 1], [3, 4]]


def row_numbers(path: Path) -> list[int]:
    """Returns W&B's own number of each row: in its file a text, field 16, that follows the name `_step`.

    The file also has a summary after each row, with the same number.
    """
    found = re.findall(rb"_step\x82\x01(.)(\d+)", path.read_bytes(), re.DOTALL)
    # The byte before a text is its length; a checksum may follow, and may begin with a digit.
    return list(dict.fromkeys(int(text[: length[0]]) for length, text in found))


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


def test_what_the_service_is_told(logged_run: LoggedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Mock()
    run = package.init.return_value
    run.offline = False
    monkeypatch.setitem(sys.modules, "wandb", package)
    logger = WandbLogger(replace(logged_run, step=2))
    assert package.init.call_args.kwargs["resume"] == "allow"  # also a run whose first process made none
    assert run.define_metric.call_args_list == [call("step"), call("*", step_metric="step")]
    logger.log(3, {"loss": 0.5})
    run.log.assert_called_once_with(
        {"loss": 0.5, "step": 3}, step=None, commit=True
    )  # it knows how many rows there are
    logger.fail(ValueError("wrong"))
    run.finish.assert_called_once_with(exit_code=1)


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
