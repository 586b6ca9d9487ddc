"""BackgroundSaver: a thread writes the files of a checkpoint while the training continues."""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from lightrl.comm import Comm, RankError
from lightrl.rank_board import RankBoard
from lightrl.strategy.optim.hooks import UpdateHook
from lightrl.strategy.saving.saver import SavedStrategy, TrainingStateSaver
from lightrl.strategy.saving.state_files import DeferredWriter, StateWriter

_numbers = itertools.count()  # of the saves of a program, the same on all ranks


@dataclass
class BackgroundSave:
    """A thread that runs jobs in order; an error ends them and is kept. The thread calls no collective."""

    jobs: Sequence[Callable[[], None]]
    commit: Callable[[], object]  # on rank 0, makes the files a checkpoint once all ranks have written
    board: RankBoard | None = None  # where the thread tells how it ended; None in a world of one
    error: BaseException | None = None
    number: int = field(default_factory=_numbers.__next__)
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
        if self.board is not None:
            self.board.post_result(self._name, "written" if self.error is None else f"failed: {self.error}")

    @property
    def is_written(self) -> bool:
        """Whether the jobs have ended, even if by an error."""
        return not self._thread.is_alive()

    def finish(self, comm: Comm) -> None:
        """Waits for all ranks and makes the files a checkpoint; raises one rank's error on all ranks."""
        try:
            with comm.phase("checkpoint", local=True):
                self._require_written()
        except RankError:  # perhaps only because other ranks have ended, after they had written
            if self._unwritten(comm, limit_s=0):
                raise
            if comm.is_main:
                self.commit()
            if self.board is not None and self.board.errors_now():
                raise
            return
        with comm.phase("checkpoint", local=True):
            if comm.is_main:
                self.commit()

    def finish_at_exit(self, comm: Comm) -> None:
        """Completes the save without a collective: other ranks may have ended already, or end much later."""
        if self.board is None:
            self.finish(comm)
            return
        self._require_written()
        if not comm.is_main:
            return
        unwritten = self._unwritten(comm, limit_s=comm.timeout.total_seconds())
        if unwritten:
            raise RankError(f"The last checkpoint is not complete: {unwritten}.")
        self.commit()

    def _require_written(self) -> None:
        self.wait()
        if isinstance(self.error, OSError):
            raise self.error
        if self.error is not None:
            raise RuntimeError(f"A checkpoint could not be written: {self.error}") from self.error

    def _unwritten(self, comm: Comm, limit_s: float) -> str:
        """Returns which ranks have not written their files; empty if all have."""
        posted = self.board.results(self._name, limit_s) if self.board is not None else [None] * comm.world
        return ", ".join(f"rank {rank} {text or 'is missing'}" for rank, text in enumerate(posted) if text != "written")

    @property
    def _name(self) -> str:
        return f"save/{self.number}"

    def wait(self) -> None:
        """Waits for the thread."""
        self._thread.join()


class BackgroundSaver(TrainingStateSaver):
    """Saver whose save() returns once the state is copied to host memory.

    The checkpoint is complete after a later update, finish(), the next save, or the end of a program without an error.
    """

    make_writer = DeferredWriter

    def __init__(self, strategy: SavedStrategy) -> None:
        super().__init__(strategy)
        self.pending: BackgroundSave | None = None  # the save in progress; None on all ranks or on none
        strategy.trained.hooks = [hook for hook in strategy.trained.hooks if not isinstance(hook, _Polling)]
        strategy.trained.hooks.append(_Polling(self))

    def _complete(self, writers: Sequence[StateWriter], commit: Callable[[], None]) -> None:
        jobs = [job for writer in writers if isinstance(writer, DeferredWriter) for job in writer.jobs]
        self.pending = BackgroundSave(jobs, commit, self._strategy.comm.board)
        atexit.register(self._finish_at_exit)  # before the process group is destroyed, which was made earlier

    def poll(self) -> None:
        """Completes a save in the background if all ranks have written; raises one rank's error on all ranks."""
        if self.pending is not None and self._strategy.comm.agree(self.pending.is_written):
            self.finish()

    def finish(self) -> None:
        """Waits for a save in the background and completes it; every rank must call it."""
        if self.pending is not None:
            saving, self.pending = self.pending, None
            atexit.unregister(self._finish_at_exit)
            saving.finish(self._strategy.comm)

    def _finish_at_exit(self) -> None:
        """Completes the last save of a program that does not close its strategy, unless an error ended it."""
        if self.pending is None:
            return
        if hasattr(sys, "last_type"):
            self.pending.wait()  # a thread that is within torch when the interpreter is torn down aborts the process
        else:
            saving, self.pending = self.pending, None
            saving.finish_at_exit(self._strategy.comm)


class _Polling(UpdateHook):
    """Checks after each update whether the checkpoint is written."""

    def __init__(self, saver: BackgroundSaver) -> None:
        self._saver = saver

    def after_update(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        self._saver.poll()
