"""The process of an isolated reward: started by WorkerPool, it scores the samples that it receives, one at a time."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import sys
import traceback
from numbers import Real
from pathlib import Path
from typing import Any

from lightrl.own_files import run_file
from lightrl.rewards.messages import Reply, receive, send
from lightrl.rewards.scoring import NoVerdictError, is_numpys_bool
from lightrl.rewards.time_limit import TimeLimitError, time_limit

_MEMORY_BYTES = 2 << 30  # in addition to what the loaded reward occupies
_SET_PARENT_DEATH_SIGNAL = 1  # constant of prctl(2)


def serve() -> None:
    """Answers requests until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which then closes the pipe
    _die_with_the_owner()
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # prints of the reward must not get among the replies
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # and a program that it starts must not read the requests
    try:
        file, packed = receive(requests)
        if file:
            run_file(Path(file))
        reward: Any = pickle.loads(packed)
    except (Exception, SystemExit) as error:
        send(replies, _failure(error))
        return
    _limit_memory()
    send(replies, Reply())
    while True:
        try:
            sample, timeout_s = receive(requests)
        except EOFError:
            return
        send(replies, _answer(reward, sample, timeout_s))


def _die_with_the_owner() -> None:
    """Makes the kernel kill this process when its owner dies: a reward that hangs would not see its pipe close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _answer(reward: Any, sample: Any, timeout_s: float) -> Reply:
    try:
        with time_limit(timeout_s):
            return Reply(value=_of_pythons_own_types(reward(sample)))
    except (Exception, SystemExit) as error:
        return _failure(error)


def _of_pythons_own_types(value: Any) -> Any:
    """Returns what the owner can read without any other module; what is no number is shown in its error."""
    if value is None or type(value) in (int, str):  # an int may be too large for a float
        return value
    return float(value) if isinstance(value, Real) or is_numpys_bool(value) else repr(value)


def _failure(error: Exception | SystemExit) -> Reply:
    return Reply(
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        is_no_verdict=isinstance(error, NoVerdictError),
        is_stopped=isinstance(error, TimeLimitError),
    )


def _limit_memory() -> None:
    """Limits data memory, not address space, because torch maps many times the memory that it uses."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    limit = int(lines["VmData"].split()[0]) * 1024 + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    try:
        serve()
    except BrokenPipeError:  # the owner is gone
        sys.exit(0)
