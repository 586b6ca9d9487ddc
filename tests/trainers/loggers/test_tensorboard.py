"""TensorBoard by name."""

from lightrl.trainers.loggers.attach import LoggedRun
from lightrl.trainers.loggers.tensorboard import TensorBoardLogger


def test_scalars_are_written(logged_run: LoggedRun) -> None:
    logger = TensorBoardLogger(logged_run)
    logger.log(1, {"reward/mean": 0.25})
    (file,) = (logged_run.folder / "tensorboard").iterdir()
    assert b"reward/mean" in file.read_bytes()  # even if the run is killed now
    logger.close()
