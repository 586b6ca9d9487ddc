"""The real trackio, which writes to a folder."""

import importlib
from pathlib import Path

import pytest

from lightrl.trainers.loggers.attach import LoggedRun
from lightrl.trainers.loggers.trackio import TrackioLogger

pytest.importorskip("trackio", reason='needs trackio: pip install "lightrl[trackio]"')


def test_a_run_is_written_without_a_network(
    logged_run: LoggedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in (("TRACKIO_DIR", "trackio.utils"), ("TRACKIO_DIR", "trackio.sqlite_storage")):
        monkeypatch.setattr(importlib.import_module(module), name, tmp_path, raising=False)
    logger = TrackioLogger(logged_run)
    for step in (0, 1):
        logger.log(step, {"reward/mean": 0.25 * step})
    logger.close()
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    rows = storage.get_logs("lightrl", "run-0123abcd")
    assert [row["reward/mean"] for row in rows] == [0.0, 0.25]
    assert [row["step"] for row in rows] == [0, 1]
