"""Logs to SwanLab: to its service if SWANLAB_MODE says so, or else to swanlog/ in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightrl.imports import import_extra
from lightrl.trainers.loggers.attach import PROJECT, LoggedRun


class SwanLabLogger:
    """Logs to an experiment of SwanLab."""

    def __init__(self, run: LoggedRun) -> None:
        self._swanlab = import_extra("swanlab", extra="swanlab", needed_by="--log.to swanlab")
        self._swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            experiment_name=run.name,
            config=dict(run.options),
            logdir=str(run.folder / "swanlog"),
            mode=os.environ.get("SWANLAB_MODE", "local"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the experiment."""
        self._swanlab.finish()
