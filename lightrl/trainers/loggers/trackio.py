"""Logs to trackio, whose database is a folder on this machine (TRACKIO_DIR): `trackio show` opens it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightrl.imports import import_extra
from lightrl.trainers.loggers.attach import PROJECT, LoggedRun


class TrackioLogger:
    """Logs to a run of trackio; a resumed run continues the same one."""

    def __init__(self, run: LoggedRun) -> None:
        trackio = import_extra("trackio", extra="trackio", needed_by="--log.to trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id}",
            config=dict(run.options),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def fail(self, error: BaseException) -> None:
        """Writes what trackio's thread, which writes twice a second, has not written yet; it knows no failed runs."""
        self._run.finish()

    def close(self) -> None:
        """Ends the run of trackio; a second end, as after a signal, changes nothing."""
        self._run.finish()
