"""TensorBoard by name."""

from dataclasses import replace

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightrl.trainers.loggers.attach import LoggedRun
from lightrl.trainers.loggers.tensorboard import TensorBoardLogger


def test_scalars_are_written(logged_run: LoggedRun) -> None:
    logger = TensorBoardLogger(logged_run)
    logger.log(1, {"reward/mean": 0.25})
    (file,) = (logged_run.folder / "tensorboard").iterdir()
    assert b"reward/mean" in file.read_bytes()  # even if the run is killed now
    logger.close()


def test_each_step_is_shown_once_after_a_kill(logged_run: LoggedRun) -> None:
    for first, *steps in ((0, 0, 1, 2), (0, 0, 1, 2), (1, 2, 3)):  # it begins, begins again, and continues after step 1
        logger = TensorBoardLogger(replace(logged_run, step=first))
        for step in steps:
            logger.log(step, {"loss": 0.5})
        logger.close()
    board = EventAccumulator(str(logged_run.folder / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss")] == [0, 1, 2, 3]
