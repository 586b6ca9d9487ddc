"""Logs to SwanLab: to its service if SWANLAB_MODE says so, or else to swanlog/ in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightrl.imports import import_extra
from lightrl.trainers.loggers.attach import PROJECT, LoggedRun

_LENGTH = 21  # of the id of an experiment, which older versions demand


class SwanLabLogger:
    """Logs to an experiment of SwanLab; with the service, a resumed run continues the same one."""

    def __init__(self, run: LoggedRun) -> None:
        self._swanlab = import_extra("swanlab", extra="swanlab", needed_by="--log.to swanlab")
        mode = os.environ.get("SWANLAB_MODE", "local")
        self._swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            experiment_name=run.name,
            config=dict(run.options),
            logdir=str(run.folder / "swanlog"),
            mode=mode,
            **(_same_experiment(run) if mode in ("cloud", "online") else {}),  # other modes cannot continue one
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the experiment."""
        self._swanlab.finish()


def _same_experiment(run: LoggedRun) -> dict[str, str]:
    """Returns arguments by which SwanLab's service continues the experiment of a run, or makes it."""
    return {
        "id": os.environ.get("SWANLAB_RUN_ID", run.id.ljust(_LENGTH, "0")),
        "resume": os.environ.get("SWANLAB_RESUME", "allow"),
    }
