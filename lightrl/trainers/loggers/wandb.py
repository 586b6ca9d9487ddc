"""Logs to Weights & Biases, which obeys WANDB_MODE=offline, WANDB_PROJECT and its other variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightrl.imports import import_extra
from lightrl.trainers.loggers.attach import PROJECT, LoggedRun


class WandbLogger:
    """Logs to a run of W&B; a continued run goes on in the same one."""

    def __init__(self, run: LoggedRun) -> None:
        wandb = import_extra("wandb", extra="wandb", needed_by="--log.to wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.options),
            # The command line as it was typed, code and output do not leave the machine.
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run of W&B, whose service finishes its file by the end of the process."""
        self._run.finish()
