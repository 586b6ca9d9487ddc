"""BackgroundSave: the files of one checkpoint are written by a thread while the training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightrl.comm import Comm


@dataclass
class BackgroundSave:
    """Runs the jobs in order from the start; an error ends them and is kept. The thread calls no collective."""

    jobs: Sequence[Callable[[], None]]
    commit: Callable[[], object]  # makes the files a checkpoint, on rank 0, once all ranks have written
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
            self.jobs = ()  # they hold the copies of the tensors

    @property
    def is_written(self) -> bool:
        """Whether the jobs have ended, also by an error."""
        return not self._thread.is_alive()

    def finish(self, comm: Comm) -> None:
        """Waits for all ranks and makes the files a checkpoint; raises on all ranks what failed on one."""
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
