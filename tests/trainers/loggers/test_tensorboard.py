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
    starts = ((0, 0, 1, 2), (0, 0, 1, 2), (1, 2, 3))  # it begins, begins again, and continues after step 1
    folder = logged_run.folder / "tensorboard"
    for second, (first, *steps) in enumerate(starts):
        logger = TensorBoardLogger(replace(logged_run, step=first))
        for step in steps:
            logger.log(step, {"loss": 0.5})
        logger.close()
        (written,) = (path for path in folder.iterdir() if len(path.suffixes) > 3)
        written.rename(folder / f"events.out.tfevents.{second}")  # files are read in the order of the names' seconds
    board = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in board.Scalars("loss")] == [0, 1, 2, 3]
