"""Logs to Weights & Biases. WANDB_MODE=offline, WANDB_PROJECT and its other variables hold."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightrl.imports import import_extra
from lightrl.trainers.loggers.attach import PROJECT, LoggedRun


class WandbLogger:
    """Logs to a run of W&B that a continued run continues."""

    def __init__(self, run: LoggedRun) -> None:
        wandb = import_extra("wandb", extra="wandb", needed_by="--log.to wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.options),
            # Neither the command line, with its options as they were typed, nor code or output leaves the machine.
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run of W&B, whose service writes the last of its file by the end of the process."""
        self._run.finish()
