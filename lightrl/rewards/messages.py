"""Messages between a worker process and its owner: the reward, samples and replies.

They are pickles, each preceded by its length, sent over pipes. Both ends are this program, and no pickle is read from a
file or socket.
"""

from __future__ import annotations

import inspect
import os
import pickle
import select
import struct
import time
from dataclasses import dataclass
from typing import Any

from lightrl.own_files import is_of_file
from lightrl.rewards.scoring import reward_name, unwrapped

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reward of a sample, or the reason why it has none."""

    value: Any = None
    error: str = ""
    traceback: str = ""
    is_no_verdict: bool = False
    is_stopped: bool = False  # it took too long, or its process died


def send(fd: int, message: Any) -> None:
    """Sends a message; raises BrokenPipeError if the other end is gone."""
    payload = pickle.dumps(message)
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int, timeout_s: float | None = None) -> Any:
    """Returns the next message; raises TimeoutError after timeout_s, and EOFError if the other end is gone."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))
    return pickle.loads(_read(fd, length, deadline))


def _read(fd: int, count: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    ready = select.poll()  # unlike select(), it takes numbers from 1024 on
    ready.register(fd, select.POLLIN)
    while count:
        if not ready.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def packed_for_worker(reward: Any) -> tuple[str, bytes]:
    """Returns the data from which a worker loads the same reward: (the file to run first or "", the pickled reward)."""
    function = unwrapped(reward)
    named = function if inspect.isfunction(function) else type(function)
    if named.__module__ == "__main__" or "<" in named.__qualname__:
        raise ValueError(
            f"The reward {reward_name(reward)!r} is isolated, and its processes cannot find it: define it at the top "
            "of a file or module other than the one that is started."
        )
    file = inspect.getfile(named) if is_of_file(named.__module__) else ""
    return file, pickle.dumps(reward)
