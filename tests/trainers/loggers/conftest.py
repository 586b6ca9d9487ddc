"""A run to log."""

from pathlib import Path

import pytest

from lightrl.trainers.loggers.attach import LoggedRun


@pytest.fixture
def logged_run(tmp_path: Path) -> LoggedRun:
    """A run that was given a secret by mistake."""
    folder = tmp_path / "run"
    folder.mkdir()
    return LoggedRun(name="run", id="0123abcd", folder=folder, step=0, options={"lr": 0.5, "judge.key": "***"})
