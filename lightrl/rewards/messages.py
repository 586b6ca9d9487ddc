"""What a worker process and its owner say to each other: pickles with their length before them, over pipes.

Both ends are this program; nothing of it is read from a file or a socket.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import time
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A sample's reward, or why there is none."""

    value: Any = None
    error: str = ""
    traceback: str = ""
    is_no_verdict: bool = False
    is_stopped: bool = False  # it took too long, or its process died


def send(fd: int, message: Any) -> None:
    """Raises BrokenPipeError if the other end is gone."""
    payload = pickle.dumps(message)
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int, timeout_s: float | None = None) -> Any:
    """The next message. Raises TimeoutError after so many seconds, EOFError if the other end is gone."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))
    return pickle.loads(_read(fd, length, deadline))


def _read(fd: int, count: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while count:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([fd], [], [], left_s)[0]:
            raise TimeoutError
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
