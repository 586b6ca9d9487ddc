"""What a run does when it cannot write to disk: it ends with one sentence, or continues if the options say so."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import nn

from lightrl.checkpoint import CheckpointDirectory
from lightrl.comm import Comm, RankError
from lightrl.records import Experience
from lightrl.strategy import StrategyBase
from lightrl.strategy.saving.background_save import BackgroundSaver
from lightrl.strategy.saving.saver import SaveRequest, TrainingStateSaver
from lightrl.trainers.run_folder import RunFolder, own

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_OF_THE_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ESTALE)  # if it is the run's


def find_disk_error(error: BaseException | None, root: Path) -> OSError | None:
    """Returns the disk error that caused an error, even one that another rank reported; None if there is none."""
    while error is not None:
        found = _as_os_error(error)
        if found is not None:
            path = Path(os.fsdecode(found.filename or ""))  # TensorBoard names its files in bytes
            is_ours = root in (path, *path.parents)
            return found if found.errno in _OF_THE_DISK or (found.errno in _OF_THE_FOLDER and is_ours) else None
        error = error.__cause__
    return None


def _as_os_error(error: BaseException) -> OSError | None:
    if isinstance(error, OSError):
        return error
    text = (error.mistake or _last_line(error)) if isinstance(error, RankError) else str(error)
    found = re.search(r"\[Errno (\d+)\] [^:]*(?:: '([^']*)')?|\(os error (\d+)\)", text)  # the latter: safetensors
    if found is None:
        return None
    code = int(found[1] or found[3])
    return OSError(code, os.strerror(code), *([found[2]] if found[2] else []))


def _last_line(error: RankError) -> str:
    """Returns the error of the only rank that failed, while others were waiting for it, from the end of its report."""
    text = str(error).rstrip()
    return text.rpartition("\n")[2] if text.count("--- rank ") == 1 else ""


def raise_with_folder(error: Exception, folder: Path) -> NoReturn:
    """Raises an error again; a disk error that names no file, as libraries' do not, with the folder being written."""
    found = None if isinstance(error, RankError) else _as_os_error(error)
    if found is not None and found.errno in _OF_THE_DISK and not found.filename:
        raise OSError(found.errno, found.strerror, str(folder)) from error
    raise error


def describe_disk_error(error: OSError) -> str:
    """Returns a text that says which file could not be written, and why."""
    where = f" for {os.fsdecode(error.filename)}" if error.filename else ""
    if error.errno == errno.ENOENT and "/.tmp-step-" in where:  # rank 0 made the folder of the checkpoint
        where += " (do all nodes share this folder?)"
    what = "the disk takes no more" if error.errno in _OF_THE_DISK else "the run's folder takes no more"
    return f"{what} ({error.strerror}){where}: what was written before is kept"


# ---- --checkpoint.on_disk_error continue -----------------------------------------------------------------------------


class Log(Protocol):
    """The files of a run that get new lines in each step."""

    def write(self, metrics: dict[str, float]) -> None: ...

    def write_samples(self, experience: Sequence[Experience]) -> None: ...

    def close(self) -> None: ...


class DrawnLog(Log, Protocol):
    """A log that TensorBoard draws."""

    def draw(self, metrics: dict[str, float]) -> None: ...


class LoggingTrainer(Protocol):
    """The parts of a trainer that this module needs."""

    run: Any  # its RunContext
    step_index: int

    @property
    def strategy(self) -> StrategyBase: ...

    @property
    def folder(self) -> RunFolder: ...


def forgive_disk_errors(trainer: LoggingTrainer, open_log: Callable[[], DrawnLog]) -> Log:
    """Makes a run warn and go on when it cannot write; returns the log to use, which reopens itself after an error."""
    strategy = trainer.strategy
    kind = ForgivingBackgroundSaver if isinstance(strategy.saver, BackgroundSaver) else ForgivingSaver
    strategy.saver = kind(strategy, trainer.folder.root)
    return ForgivingLog(trainer, open_log)


class ForgivingSaver(TrainingStateSaver):
    """Saver that skips a checkpoint that cannot be written; all ranks agree on that."""

    def __init__(self, strategy: StrategyBase, root: Path) -> None:
        super().__init__(strategy)
        self._comm, self._root = strategy.comm, root

    def save(self, model: nn.Module, request: SaveRequest) -> None:
        """Writes a checkpoint, or warns."""
        self._try(lambda: super(ForgivingSaver, self).save(model, request))

    def finish(self) -> None:
        """Completes a save in the background, or warns."""
        self._try(super().finish)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            found = find_disk_error(error, self._root)
            if not self._comm.agree(found is not None):
                raise
            _warn(self._comm, found, "no checkpoint of this step")
            if self._comm.is_main:  # all ranks have stopped writing, and the rest of the run needs the room
                CheckpointDirectory(self._root / "checkpoints", keep=1).drop_unfinished()


class ForgivingBackgroundSaver(ForgivingSaver, BackgroundSaver):
    """Saver that also skips a checkpoint that the background thread could not write."""


class ForgivingLog:
    """Log that skips lines that cannot be written and makes a removed folder again."""

    def __init__(self, trainer: LoggingTrainer, open_log: Callable[[], DrawnLog]) -> None:
        self._trainer, self._open, self._log = trainer, open_log, open_log()
        self._is_broken = False  # TensorBoard's writer raises its first error again and again

    def write(self, metrics: dict[str, float]) -> None:
        """Logs the metrics of the last step, or warns of each file that lacks them."""
        was_broken, self._is_broken = self._is_broken, True  # a removed folder takes TensorBoard's file with it
        with self._trainer.strategy.comm.phase("log"):
            if self._try(lambda: self._write_row(metrics), "no metrics of this step"):
                self._try(lambda: self._draw(metrics, was_broken), "TensorBoard lacks this step")

    def _write_row(self, metrics: dict[str, float]) -> None:
        if self._trainer.strategy.comm.is_main:
            self._trainer.folder.append_metrics(self._trainer.step_index, metrics)

    def _draw(self, metrics: dict[str, float], was_broken: bool) -> None:
        if was_broken:
            self._log = self._open()
        self._log.draw(metrics)
        self._is_broken = False

    def write_samples(self, experience: Sequence[Experience]) -> None:
        """Logs samples, or warns; the only part that can fail comes last, after all collectives."""
        self._try(lambda: self._log.write_samples(experience), "no samples of this step")

    def close(self) -> None:
        """Flushes TensorBoard, or warns."""
        self._try(self._log.close, "TensorBoard lacks its last lines")

    def _try(self, act: Callable[[], None], loss: str) -> bool:
        return forgive(self._trainer, act, loss)


def forgive(trainer: LoggingTrainer, act: Callable[[], None], loss: str) -> bool:
    """Calls a function that writes to a run's folder; on a disk error, warns and makes a removed folder again.

    Returns whether there was no error.
    """
    folder = trainer.folder
    try:
        act()
        return True
    except OSError as error:
        found = find_disk_error(error, folder.root)
        if found is None:
            raise
        _warn(trainer.strategy.comm, found, loss)
        if not folder.is_complete:  # even if a checkpoint has made the folder again meanwhile
            own(folder.root)
            folder.open(trainer.run.config, trainer.step_index)
        return False


def _warn(comm: Comm, error: OSError | None, loss: str) -> None:
    if comm.is_main and error is not None:
        sys.stderr.write(f"warning: {describe_disk_error(error)}; {loss}, and the run goes on\n")
