"""StallWatch: reports which rank the others wait for in vain, in which phase and at which line, and ends that rank.

A rank whose collective breaks asks the others through the store, and a thread on each of them answers with the stack of
its main thread. A process that is stopped, or whose interpreter is held by a call into C, does not answer. Another rank
on the same host then signals it, so that faulthandler writes its stack, and kills it. One rank makes the report.

A collective on a GPU does not break: the main thread waits for the device, until torch ends the process a minute after
NCCL's time-out. The thread therefore looks for NCCL's error, and asks in place of the main thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from lightrl.process_group import name_of
from lightrl.rank_board import RankBoard, Store

_ASKED, _TOLD = "lightrl/stall/asked", "lightrl/stall/told"
_STACK_SIGNAL = signal.SIGRTMIN + 6 if sys.platform == "linux" else 0  # one that nobody else sends
_POLL_S = 1.0  # how often the thread looks at the store
_ANSWER_S = 3.0  # limit for the answer of a rank that can answer
_STACK_S = 3.0  # limit for faulthandler to write a stack
_SKEW_S = 5.0  # by which ranks may come to a collective one after the other, and find its time-out
_REPORT_S = 20.0  # limit for the report; a store that takes longer has lost its host
_WAIT_S = 15.0  # for another rank to report, or to kill this one; at _REPORT_S the store would be blamed

_end: Callable[[int], Any] | None = None


class WatchedStore(Store, Protocol):
    """The part of torch's key-value store that the watch uses."""

    def add(self, key: str, amount: int) -> int: ...


def end_by(end: Callable[[int], Any]) -> None:
    """Watches every world that this process joins from now on; end(code) is called to end the process."""
    global _end
    _end = end


def is_wanted() -> bool:
    """Returns whether end_by() was called."""
    return _end is not None


class StallWatch:
    """Answers the questions of other ranks, and asks them in turn when a collective of this rank breaks."""

    def __init__(
        self,
        store: WatchedStore,
        board: RankBoard,
        rank: int,
        world: int,
        error_of_device: Callable[[], str] | None = None,
    ) -> None:
        """Takes `error_of_device`, which returns the error of a collective on this rank's GPU, or an empty text."""
        self._error_of_device = error_of_device
        self._store = store
        # A connection of its own, which no call of the main thread can block. torch's stubs lack the method.
        self._own_store: WatchedStore = cast(Any, store).clone()
        self._board, self._rank, self._world = board, rank, world
        self._has_given_up = False
        self._stopped = threading.Event()
        self._stack_file = _stack_file()
        me = {**_process(os.getpid()), "stack_file": self._stack_file}
        store.set(f"lightrl/stall/process/{rank}", json.dumps(me))
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)
        self._thread.start()

    @property
    def is_reporting(self) -> bool:
        """Whether this rank is waiting for the report or making it."""
        return self._has_given_up

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join(_ANSWER_S)

    # ---- The main thread of a rank whose collective broke --------------------------------------------------------

    def why_lost(self, text: str) -> str:
        """Returns the errors that other ranks left with; if there are none, a text that says where the report is."""
        with self._ended_without_store(text):
            errors = self._board.errors_of_others()
            if errors:
                return self._board.describe_errors(errors)
            self._has_given_up = True
            if self._store.check([_looked_at(self._rank)]):  # this process was stopped, and is about to be killed
                time.sleep(_WAIT_S)
            self._answer(self._store, {"waits": text})
            if self._store.add(_ASKED, 1) > 1:
                self._wait_for([_TOLD], _WAIT_S)
                return f"rank {self._rank} waited for another rank in vain; the rank that asked first says for which."
            self._wait_for([_answer_of(rank) for rank in range(self._world)], _ANSWER_S + 2 * _STACK_S)
            # Written before the others are told: as soon as one of them ends, torchrun kills this rank.
            sys.stderr.write("\n".join([f"[rank {self._rank}] {text}", *self._describe_others()]) + "\n")
            sys.stderr.flush()
            self._board.post_error(RuntimeError(f"other ranks did not come; rank {self._rank} has reported them"))
            self._store.set(_TOLD, "")
            self._thread.join(_ANSWER_S)  # it may have processes to kill
            return f"rank {self._rank} waited for another rank in vain; its report on standard error says which."

    @contextmanager
    def _ended_without_store(self, text: str) -> Iterator[None]:
        timer = threading.Timer(_REPORT_S, partial(_end_alone, self._rank, text))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _wait_for(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _describe_others(self) -> Iterator[str]:
        """Yields first what holds up the run, then a line for each rank that is waiting."""
        answers = {rank: self._read(_answer_of(rank)) for rank in range(self._world) if rank != self._rank}
        for rank, answer in sorted(answers.items(), key=lambda item: "waits" in item[1]):
            process = self._read(f"lightrl/stall/process/{rank}")
            where = f"process {process.get('pid', '?')} on {process.get('host', '?')}"
            phase = self._board.phase_of(rank) or "before its first phase"
            if "waits" in answer:
                yield f"{name_of(rank)} waited too, {phase}."
            else:
                state = answer.get("state", "gives no answer, and no rank on its host can look at it")
                yield f"{name_of(rank)} did not come: {phase}; {where} {state}.\n{answer.get('stack', '')}".rstrip()

    # ---- The thread --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._is_asked():
            self._take_part()

    def _is_asked(self) -> bool:
        """Waits until a rank asks; returns False when the run ends, or when the store's host is gone."""
        with suppress(RuntimeError):
            while not self._own_store.check([_ASKED]):
                if self._stopped.wait(_POLL_S):
                    return False
                if self._error_of_device is not None and not self._has_given_up:
                    self._look_at_device(self._error_of_device())
            return True
        return False

    def _look_at_device(self, error: str) -> None:
        if error:
            self._has_given_up = True
            threading.Thread(target=self._give_up, args=(error,), name="stall report", daemon=True).start()

    def _give_up(self, error: str) -> None:
        """Makes the report, or waits for that of another rank, and ends this process."""
        phase = self._board.phase
        text = f"rank {self._rank} waited for its GPU in phase {phase!r}: NCCL gave up a collective ({error})"
        self._answer(self._store, {"waits": text})
        time.sleep(_SKEW_S)
        sys.stderr.write(f"[rank {self._rank}] {self.why_lost(text)}\n")
        _end_process()

    def _take_part(self) -> None:
        with suppress(RuntimeError):  # the rank that asked was the store's host, and has ended after its report
            if not self._has_given_up and not self._own_store.check([_looked_at(self._rank)]):
                self._answer(self._own_store, {"state": "is running", "stack": _main_stack()})
            stopped = self._look_at_silent_ranks()
            deadline = time.monotonic() + _REPORT_S
            while not self._own_store.check([_TOLD]) and time.monotonic() < deadline:
                time.sleep(0.1)
            for pid in stopped:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if not self._has_given_up and not self._stopped.is_set():
            sys.stderr.write(f"[rank {self._rank}] ends, since other ranks waited for this one in vain\n")
            _end_process()

    def _look_at_silent_ranks(self) -> list[int]:
        """Answers for silent ranks on this host unless another rank does; returns their processes."""
        deadline = time.monotonic() + _ANSWER_S
        ranks = range(self._world)
        while (silent := [rank for rank in ranks if not self._has_answered(rank)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        processes = {rank: self._read(f"lightrl/stall/process/{rank}") for rank in ranks}
        here = [rank for rank in ranks if processes[rank].get("host") == _host()]
        if self._rank != min((rank for rank in here if rank not in silent), default=-1):
            return []
        for rank in (rank for rank in here if rank in silent):
            self._own_store.set(_looked_at(rank), "")  # it runs on for a moment, in which it would answer itself
            self._answer(self._own_store, _stopped_with_stack(processes[rank]), rank)
        return [int(processes[rank]["pid"]) for rank in here if rank in silent and _is_there(processes[rank])]

    # ---- The store ---------------------------------------------------------------------------------------------

    def _answer(self, store: WatchedStore, answer: dict[str, str], rank: int | None = None) -> None:
        store.set(_answer_of(self._rank if rank is None else rank), json.dumps(answer))

    def _has_answered(self, rank: int) -> bool:
        return self._own_store.check([_answer_of(rank)])

    def _read(self, key: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._own_store.get(key)) if self._own_store.check([key]) else {}
        return content


def _answer_of(rank: int) -> str:
    return f"lightrl/stall/answer/{rank}"


def _looked_at(rank: int) -> str:
    return f"lightrl/stall/looked_at/{rank}"


def _end_process() -> None:
    (_end or os._exit)(1)


def _end_alone(rank: int, text: str) -> None:
    sys.stderr.write(
        f"[rank {rank}] {text}\nThe store of the ranks gives no answer: the process that keeps it is stopped or gone. "
        "It is torchrun on the first node, or else rank 0.\n"
    )
    _end_process()


# ---- Stacks and processes --------------------------------------------------------------------------------------------


def _main_stack() -> str:
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else ""


def _stack_file() -> int:
    """Returns an unnamed file that receives this process's stack at a signal; -1 if the system has none."""
    if not _STACK_SIGNAL:
        return -1
    descriptor = os.memfd_create("stack")
    faulthandler.register(_STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)
    return descriptor


def _host() -> str:
    return socket.gethostname()


def _process(pid: int) -> dict[str, Any]:
    """Returns facts that distinguish a process from a later one with the same process id."""
    return {"host": _host(), "pid": pid, "started": _status(pid)[1]}


def _status(pid: int) -> tuple[str, str]:
    """Returns the state letter and the start time of a process, as /proc shows them; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _is_there(process: dict[str, Any]) -> bool:
    state, started = _status(int(process["pid"]))
    return bool(state) and state not in "ZX" and started == process["started"]


def _stopped_with_stack(process: dict[str, Any]) -> dict[str, str]:
    """Stops a process of this host that does not answer; returns the state that it was in, and its stack."""
    pid = int(process["pid"])
    state, _ = _status(pid)
    if not _is_there(process):
        return {"state": "is gone; a process that the system killed for its memory leaves no other trace"}
    stack = ""
    with suppress(OSError):
        if process["stack_file"] >= 0:
            _signal_main_thread(pid)
            os.kill(pid, signal.SIGCONT)
            stack = _written_stack(Path(f"/proc/{pid}/fd/{process['stack_file']}"))
        os.kill(pid, signal.SIGSTOP)
    reasons = {"T": "was stopped by a signal (SIGSTOP)", "t": "was stopped by a debugger", "D": "waited for a disk"}
    return {"state": f"{reasons.get(state, 'was held by a call into C')} and was killed", "stack": stack}


def _signal_main_thread(pid: int) -> None:
    """Requests the stack by a signal to the main thread: another thread would write it after the main one moved on."""
    try:
        ctypes.CDLL(None).tgkill(pid, pid, _STACK_SIGNAL)
    except AttributeError:  # the C library lacks the function
        os.kill(pid, _STACK_SIGNAL)


def _written_stack(file: Path) -> str:
    deadline = time.monotonic() + _STACK_S
    text = ""
    while time.monotonic() < deadline:
        before, text = text, file.read_text()
        if text and text == before:
            break
        time.sleep(0.01)
    return text.rstrip().rpartition("\n\n")[2]  # the main thread is the oldest, and comes last
