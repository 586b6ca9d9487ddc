"""Logs to Weights & Biases, which obeys WANDB_MODE=offline, WANDB_PROJECT and its other variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightrl.imports import import_extra
from lightrl.trainers.loggers.attach import PROJECT, LoggedRun

_AXIS = "step"  # the x-axis of all charts


class WandbLogger:
    """Logs to a run of W&B; a resumed run continues the same one."""

    def __init__(self, run: LoggedRun) -> None:
        wandb = import_extra("wandb", extra="wandb", needed_by="--log.to wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            id=os.environ.get("WANDB_RUN_ID", run.id),
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            config=dict(run.options),
            # The command line as it was typed, code and output do not leave the machine.
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True),
        )
        # W&B ignores values for an earlier step than its last one, as a run resumed from a checkpoint logs them, unless
        # the step is a metric like others: https://wandb.me/define-metric
        self._run.define_metric(_AXIS)
        self._run.define_metric("*", step_metric=_AXIS)
        # Offline, W&B cannot ask how many rows the run has, and numbers those of each process from 0: the rows of a
        # continued run would have the numbers of the first ones when they are synced.
        self._first_row: int | None = run.step + 1 if run.step and self._run.offline else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log({**metrics, _AXIS: step}, step=self._first_row, commit=True)
        self._first_row = None  # W&B counts on from there

    def fail(self, error: BaseException) -> None:
        """Ends the run of W&B as failed, since its service loses up to 32 KB of an offline run that is not ended."""
        self._run.finish(exit_code=1)

    def close(self) -> None:
        """Ends the run of W&B, whose service finishes its file by the end of the process."""
        self._run.finish()
