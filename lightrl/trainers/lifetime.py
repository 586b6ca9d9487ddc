"""How a run ends before its last step: with a checkpoint after a signal, at once when torchrun is gone."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

from lightrl import stall_watch
from lightrl.checkpoint import CheckpointDirectory
from lightrl.comm import MISTAKES, RankError, current
from lightrl.config import LateMistakeError, print_user_error
from lightrl.forked import end_child
from lightrl.imports import line_of_own_code
from lightrl.last_error import leave_error
from lightrl.metrics import Statistics, Stopwatch
from lightrl.own_calls import called_own_code
from lightrl.process_group import rank_name, why_not_joined
from lightrl.rank_board import describe
from lightrl.rewards.own_frames import explain
from lightrl.rewards.scoring import RewardError
from lightrl.strategy import StrategyBase
from lightrl.trainers.disk_errors import describe_disk_error, find_disk_error
from lightrl.trainers.run_folder import RunFolder, remove_empty_runs

EXIT_SAVED = 75  # EX_TEMPFAIL of sysexits.h: the same command continues from here
_STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_POLL_S = 1.0  # between two checks of the parent and the clock
_LAG_S = 1.0  # a signal to the whole job may end torchrun before it reaches the ranks
_INTERRUPT_S = 5.0  # for Python to get out of a call into C after Ctrl-C
_OWN_WORD_S = 2.0  # for a rank whose collective broke to say which rank failed and to end on its own
_LAST_WORD_S = 5.0  # for other ranks and loggers to be told how the run ended
_TIDYING_S = 0.5  # for rank 0 to remove the folder of a run that never began
_PR_SET_PDEATHSIG = 1  # an option of prctl(2)
_ORPHANED = signal.SIGRTMIN + 7 if sys.platform == "linux" else 0  # a signal that nobody else sends


class StoppableRun(Protocol):
    """The parts of a trainer that this module needs."""

    config: Any
    step_index: int

    @property
    def strategy(self) -> StrategyBase: ...

    @property
    def folder(self) -> RunFolder: ...

    def save(self) -> None: ...

    def close(self) -> None: ...


class StoppableTraining(StoppableRun, Protocol):
    """A run whose steps this module leaves."""

    statistics: Statistics
    watch: Stopwatch


class StoppedBySignal(SystemExit):
    """Raised when a signal ends the training; the exit code is 75 if the same command continues from here."""


# ---- Between the steps -----------------------------------------------------------------------------------------------


@contextmanager
def ended_by_signals(run: StoppableTraining) -> Iterator[Callable[[], bool]]:
    """Yields a function that every rank must call before a step; it returns whether there is another step.

    After a signal on any rank, the function writes a checkpoint and raises StoppedBySignal on all ranks.
    """
    watch = SignalWatch(run)
    watch.start()
    try:
        yield partial(_goes_on, run, watch)
    except (Exception, KeyboardInterrupt) as error:
        _leave_step(run, error)
        raise
    finally:
        watch.stop()


def _goes_on(run: StoppableRun, watch: SignalWatch) -> bool:
    received = run.strategy.comm.max_int(watch.received)
    is_over = run.step_index >= run.config.max_steps
    if received and not is_over:
        _save_and_stop(run, received)
    return not is_over


def _leave_step(run: StoppableTraining, error: BaseException) -> None:
    """Drops the results of a failed step, since a notebook may continue, or reports that another rank has failed.

    That is told while signals are still handled: torchrun ends this rank once the failed one is gone.
    """
    if not isinstance(error, RankError):
        for trained in run.strategy.trained.entries:
            run.strategy.layout.drop_gradients(trained.model)
        run.statistics.take()
        run.watch.take()
    elif is_under_torchrun() and not _tell_of_disk(error, run):
        tell(error)
        _say(f"The run has ended; {how_to_go_on(run)}.")


def _save_and_stop(run: StoppableRun, signum: int) -> NoReturn:
    name, every = signal.Signals(signum).name, run.config.checkpoint.every
    if every:
        if run.step_index % every:  # otherwise it has just been written, or nothing was trained yet
            run.save()
        run.strategy.saver.finish()
    if run.strategy.comm.is_main:
        _say(f"{name}: the run ends after step {run.step_index}; {how_to_go_on(run)}")
    raise StoppedBySignal(EXIT_SAVED if every else 128 + signum)


def let_first_rank_tidy_up() -> None:
    """Makes other ranks wait for rank 0, which owns the run's folder: torchrun ends it once one of them exits."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_TIDYING_S)


def how_to_go_on(run: StoppableRun | None) -> str:
    """Returns a text that says where the same command continues."""
    if run is None:
        return "nothing was trained yet: the same command starts again"
    newest = CheckpointDirectory(run.folder.checkpoints, keep=1).latest()
    if newest is None:
        reason = ", since --checkpoint.every is 0" if not run.config.checkpoint.every else ""
        return f"there is no checkpoint{reason}: the same command starts from the beginning"
    return f"the same command with --output_dir {run.folder.root} continues from {newest.name}"


# ---- After an error --------------------------------------------------------------------------------------------------


def end_failed(error: BaseException, trainer: StoppableRun | None) -> NoReturn:
    """Ends the process of a program after an error, a signal or Ctrl-C; trainer: None if none was built yet."""
    if os.getpid() != (process := current().process):
        end_child(process)
    try:
        with suppress(KeyboardInterrupt):  # torchrun passes Ctrl-C on to one rank after the other
            _tell_others(error, trainer)
        code = _explain(error, trainer)
    except BaseException as second:  # an error whose text cannot be made, for example
        _say(describe(second).rstrip())
        code = 1
    end_process(code)


def _explain(error: BaseException, trainer: StoppableRun | None) -> int:
    """Says why the run ends, to people and to torchrun; returns the exit code."""
    mistake = _mistake_in(error) if trainer is None or isinstance(error, LateMistakeError) else None
    if mistake is not None:
        _refuse(mistake, error)
        return 2
    if isinstance(error, StoppedBySignal) and trainer is not None:
        trainer.close()
        return int(error.code or 0)
    if isinstance(error, KeyboardInterrupt):
        _say(f"interrupted; {how_to_go_on(trainer)}")
        return 130
    if _tell_of_disk(error, trainer):
        return 1
    if isinstance(error, RankError):
        tell(error)
    else:
        text = explain(error) if isinstance(error, RewardError) else describe(error) + why_not_joined(error)
        text = text.rstrip()
        _say(text)
        leave_error(text)
    return 1


def _tell_others(error: BaseException, trainer: StoppableRun | None) -> None:
    """Tells the ranks that wait for this one, and the observers, why it ends.

    It does so in a thread, because a store or a service may not answer, and nothing must hide the error.
    """
    board = current().board if not isinstance(error, RankError | StoppedBySignal) else None
    posted = KeyboardInterrupt("Ctrl-C") if isinstance(error, KeyboardInterrupt) else error  # its line says nothing

    def tell_all() -> None:
        if board is not None:
            with suppress(Exception):
                board.post_error(posted)
        for observer in getattr(trainer, "observers", ()):  # a server of samples has none
            with suppress(Exception):
                observer.after_failure(error)

    thread = threading.Thread(target=tell_all, name="last word", daemon=True)
    thread.start()
    thread.join(_LAST_WORD_S)


def _mistake_in(error: BaseException) -> BaseException | None:
    """Returns the error if it is a mistake in the options, the data or the folder, perhaps one of another rank."""
    mistake = ValueError(error.mistake) if isinstance(error, RankError) and error.mistake else error
    return mistake if isinstance(mistake, MISTAKES) else None


def _refuse(mistake: BaseException, error: BaseException) -> None:
    """Prints a mistake that was found before a trainer was built, and leaves no folder of the run."""
    remove_empty_runs()
    called = called_own_code(error)
    line = line_of_own_code(error) or (f"\n{called}" if called else "")
    print_user_error(ValueError(f"{mistake}{line}") if line else mistake)
    let_first_rank_tidy_up()


# ---- The watch -------------------------------------------------------------------------------------------------------


class SignalWatch:
    """A thread that receives signals while the main thread waits in C, and notices when torchrun is gone."""

    received = 0  # the first signal that asks for the end
    _orphan_since: float | None = None
    _deadline: float | None = None
    _exit_code = 0  # at the deadline
    _former: Mapping[int, Any] = {}  # handlers by signal; those that start() has replaced

    def __init__(self, run: StoppableRun) -> None:
        self._run = run
        self._parent = os.getppid() if is_under_torchrun() else 0

    def start(self) -> None:
        """Handles the signals that are left at their default. Python allows this only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._heard, self.written = socket.socketpair()
        self._heard.settimeout(_POLL_S)
        self.written.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self.written.fileno(), warn_on_full_buffer=False)
        taken = (*_STOPPING, _ORPHANED) if self._parent and _ORPHANED else _STOPPING
        free = [signum for signum in taken if signal.getsignal(signum) is signal.SIG_DFL]
        self._former = {signum: signal.signal(signum, self._receive) for signum in free}
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        _listening.add(self)

    def stop(self) -> None:
        """Restores the former signal handlers."""
        if not hasattr(self, "_thread"):
            return
        _listening.discard(self)
        self.let_go()
        self.written.close()
        self._thread.join()
        self._heard.close()

    def let_go(self) -> None:
        """Restores the former handlers, in this process or in a child that it has forked."""
        signal.set_wakeup_fd(self._former_wakeup)
        for signum, handler in self._former.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, _frame: object) -> None:
        """Notes the signal for the next step; Python also sends its number to the watch, even while C code runs."""
        if signum in _STOPPING and not self.received:
            self.received = signum

    def _watch(self) -> None:
        while (heard := self._next_signals()) is not None:
            if heard or self._parent or self._deadline is not None:
                self._react(heard)

    def _next_signals(self) -> bytes | None:
        """Returns the numbers of the signals that arrived, perhaps none; None once stop() was called."""
        try:
            return self._heard.recv(64) or None
        except TimeoutError:
            return b""

    def _react(self, heard: bytes) -> None:
        for signum in heard:
            if signum in _STOPPING and signum in self._former:
                self._note(signum)
            elif signum == signal.SIGINT and self._parent:
                self._set_deadline(_INTERRUPT_S, 128 + signum)
        if self._parent and os.getppid() != self._parent:
            self._outlive_parent()
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._give_up()

    def _note(self, signum: int) -> None:
        if self._deadline is not None:
            return
        if signum == signal.SIGHUP:
            _drop_lost_terminal()
        name, seconds = signal.Signals(signum).name, self._run.config.checkpoint.grace_s
        if signum == signal.SIGTERM and self._parent:
            threading.Thread(target=self._follow_a_failure, daemon=True).start()
        self._set_deadline(seconds, 128 + signum)
        _say(f"{name}: the run ends after this step, for which it has {seconds:g} s (--checkpoint.grace_s)")
        self.received = self.received or signum

    def _follow_a_failure(self) -> None:
        """Ends the process soon if torchrun is ending this rank because another one has failed."""
        comm = self._run.strategy.comm
        if comm.has_failed_elsewhere():
            if comm.failure_of_others is not None:
                _say(comm.failure_of_others())
            else:
                time.sleep(_OWN_WORD_S)
            end_process(1)

    def _set_deadline(self, seconds: float, exit_code: int) -> None:
        self._deadline, self._exit_code = time.monotonic() + seconds, exit_code

    def _outlive_parent(self) -> None:
        """Ends the process, unless a signal to the whole job ended torchrun and this rank is still saving."""
        if self._orphan_since is None:
            self._orphan_since = time.monotonic()
        if not self.received and time.monotonic() >= self._orphan_since + _LAG_S:
            _say(f"torchrun (process {self._parent}) is gone, and so this rank ends; {how_to_go_on(self._run)}")
            end_process(1)

    def _give_up(self) -> NoReturn:
        name = signal.Signals(self._exit_code - 128).name
        _say(f"{name}: step and checkpoint took too long, so the run ends without them; {how_to_go_on(self._run)}")
        end_process(self._exit_code)


_listening: WeakSet[SignalWatch] = WeakSet()


def _let_go_in_child() -> None:
    """Lets signals end a child of a user's code, such as a worker of multiprocessing, and tells no rank of them."""
    for watch in _listening:
        watch.let_go()
        watch.written.close()  # as long as a child has it, the thread of this rank does not see its end


os.register_at_fork(after_in_child=_let_go_in_child)


def _drop_lost_terminal() -> None:
    """Sends output nowhere if its terminal was closed, so that the next line printed does not end the run."""
    for descriptor in (1, 2):  # a closed terminal is still a device but no longer a terminal
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


_told: list[BaseException] = []


def tell(error: RankError) -> None:
    """Prints once per error which rank failed, and how."""
    if error not in _told:
        _told.append(error)
        leave_error(str(error))
        with suppress(OSError, ValueError):  # nobody may be listening any more
            sys.stderr.write(f"[{rank_name() or 'rank 0'}] {error}\n")
            sys.stderr.flush()


def _tell_of_disk(error: BaseException, run: StoppableRun | None) -> bool:
    """Prints once per error, perhaps of another rank, what the disk refuses; returns whether it is one of the disk."""
    disk_error = find_disk_error(error, run.folder.root) if run is not None else None
    if disk_error is not None and error not in _told:
        _told.append(error)
        print_user_error(OSError(f"{describe_disk_error(disk_error)}; {how_to_go_on(run)}"))
    return disk_error is not None


def _say(text: str) -> None:
    name = rank_name()
    with suppress(OSError, ValueError):  # nobody may be listening any more
        sys.stderr.write(f"{f'[{name}] ' if name else ''}{text}\n")
        sys.stderr.flush()


# ---- torchrun --------------------------------------------------------------------------------------------------------


def is_under_torchrun() -> bool:
    """Returns whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_torchrun() -> None:
    """Ends this rank when torchrun is killed or others wait in vain for it; removes torchrun's folder at exit."""
    stall_watch.end_by(end_process)
    atexit.register(_remove_torchrun_folder)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _ORPHANED, 0, 0, 0)


def _remove_torchrun_folder() -> None:
    """Removes torchelastic_*/RUN/attempt_*/RANK/ of the temporary folder; the last rank to leave removes the top.

    It removes the empty folders of all ranks, since a killed rank removes none. torchrun never does:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/multiprocessing/api.py
    (DefaultLogsSpecs). Folders stay if torchrun was asked to write files there.
    """
    folders = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    if len(folders) > 3 and folders[3].name.startswith("torchelastic_"):
        # Unlike Path.glob, this finds nothing if another rank removes the folder meanwhile.
        for folder in (*map(folders[1].joinpath, glob("*", root_dir=folders[1])), *folders[1:4]):
            with suppress(OSError):
                folder.rmdir()


def end_process(code: int) -> NoReturn:
    """Ends the process at once, because tearing down a broken process group can wait for a rank that is gone."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if is_under_torchrun():
        _remove_torchrun_folder()
    os._exit(code)
