"""BackgroundSaver: a thread writes the files of a checkpoint while the training continues."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from lightrl.comm import Comm
from lightrl.strategy.optim.hooks import UpdateHook
from lightrl.strategy.saving.saver import SavedTrainer, TrainingStateSaver
from lightrl.strategy.saving.state_files import DeferredWriter, StateWriter


@dataclass
class BackgroundSave:
    """A thread that runs jobs in order; an error ends them and is kept. The thread calls no collective."""

    jobs: Sequence[Callable[[], None]]
    commit: Callable[[], object]  # on rank 0, makes the files a checkpoint once all ranks have written
    error: BaseException | None = None
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for job in self.jobs:
                job()
        except BaseException as error:
            self.error = error
        finally:
            self.jobs = ()  # frees the copies of the tensors

    @property
    def is_written(self) -> bool:
        """Whether the jobs have ended, even if by an error."""
        return not self._thread.is_alive()

    def finish(self, comm: Comm) -> None:
        """Waits for all ranks and makes the files a checkpoint; raises one rank's error on all ranks."""
        with comm.phase("checkpoint", local=True):
            self.wait()
            if isinstance(self.error, OSError):
                raise self.error
            if self.error is not None:
                raise RuntimeError(f"A checkpoint could not be written: {self.error}") from self.error
        with comm.phase("checkpoint", local=True):
            if comm.is_main:
                self.commit()

    def wait(self) -> None:
        """Waits for the thread."""
        self._thread.join()


class BackgroundSaver(TrainingStateSaver):
    """Saver whose save() returns once the state is copied to host memory.

    The checkpoint is complete after a later update, finish(), the next save, or the end of a program without an error.
    """

    make_writer = DeferredWriter

    def __init__(self, trainer: SavedTrainer) -> None:
        super().__init__(trainer)
        self.pending: BackgroundSave | None = None  # the save in progress; None on all ranks or on none
        trainer.trained.hooks = [hook for hook in trainer.trained.hooks if not isinstance(hook, _Polling)]
        trainer.trained.hooks.append(_Polling(self))

    def _complete(self, writers: Sequence[StateWriter], commit: Callable[[], None]) -> None:
        jobs = [job for writer in writers if isinstance(writer, DeferredWriter) for job in writer.jobs]
        self.pending = BackgroundSave(jobs, commit)
        atexit.register(self._finish_at_exit)  # before the process group is destroyed, which was made earlier

    def poll(self) -> None:
        """Completes a save in the background if all ranks have written; raises one rank's error on all ranks."""
        if self.pending is not None and self._trainer.comm.agree(self.pending.is_written):
            self.finish()

    def finish(self) -> None:
        """Waits for a save in the background and completes it; every rank must call it."""
        if self.pending is not None:
            saving, self.pending = self.pending, None
            atexit.unregister(self._finish_at_exit)
            saving.finish(self._trainer.comm)

    def _finish_at_exit(self) -> None:
        """Completes the last save of a program that does not close its strategy, unless an error ended it."""
        if not hasattr(sys, "last_type"):
            self.finish()
        elif self.pending is not None:
            self.pending.wait()  # a thread that is within torch when the interpreter is torn down aborts the process


class _Polling(UpdateHook):
    """Checks after each update whether the checkpoint is written."""

    def __init__(self, saver: BackgroundSaver) -> None:
        self._saver = saver

    def after_update(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        self._saver.poll()
