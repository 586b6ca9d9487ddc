"""Logs to TensorBoard if --log.to names it; --log.tensorboard True works without this file."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from lightrl.trainers.loggers.attach import LoggedRun


class TensorBoardLogger:
    """Writes scalars to tensorboard/ in the run's folder."""

    def __init__(self, run: LoggedRun) -> None:
        first_step = run.step + 1 if run.step else 0  # the evaluation before any training
        self._board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the scalars of a step."""
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()  # before the step can be in a checkpoint, since a killed run goes on after that

    def close(self) -> None:
        """Flushes what has not been written yet."""
        self._board.close()
