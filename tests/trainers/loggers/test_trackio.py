"""The real trackio, which writes to a folder."""

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.trainers.loggers.attach import LoggedRun
from lightrl.trainers.loggers.trackio import TrackioLogger

pytest.importorskip("trackio", reason='needs trackio: pip install "lightrl[trackio]"')


def writes_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[dict[str, Any]]]:
    """Makes trackio write to a folder; returns a function that reads the rows of a project's run."""
    for name, module in (("TRACKIO_DIR", "trackio.utils"), ("TRACKIO_DIR", "trackio.sqlite_storage")):
        monkeypatch.setattr(importlib.import_module(module), name, folder, raising=False)
    read: Callable[[str, str], list[dict[str, Any]]] = importlib.import_module(
        "trackio.sqlite_storage"
    ).SQLiteStorage.get_logs
    return read


def test_a_run_is_written_without_a_network(
    logged_run: LoggedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of = writes_to(tmp_path, monkeypatch)
    for steps in ((0, 2), (3,)):  # the second continues the run
        logger = TrackioLogger(logged_run)
        for step in steps:
            logger.log(step, {"reward/mean": 0.25 * step})
        logger.close()
    rows = rows_of("lightrl", "run-0123abcd")
    assert [row["reward/mean"] for row in rows] == [0.0, 0.5, 0.75]
    assert [row["step"] for row in rows] == [0, 2, 3]


def test_a_run_that_fails_has_its_last_steps(
    logged_run: LoggedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may end right after fail(), which another thread calls, without a call of close()."""
    rows_of = writes_to(tmp_path, monkeypatch)
    logger = TrackioLogger(logged_run)
    for step in range(3):
        logger.log(step, {"reward/mean": 0.25 * step})
    told = threading.Thread(target=logger.fail, args=(ValueError("a reward"),))
    told.start()
    told.join()
    assert [row["step"] for row in rows_of("lightrl", "run-0123abcd")] == [0, 1, 2]
    logger.close()  # as after a signal
    assert [row["step"] for row in rows_of("lightrl", "run-0123abcd")] == [0, 1, 2]
