"""Stops Python code that runs for too long, in the process that runs it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_REPEAT_S = 1.0  # code that swallows the alarm by a bare `except:` gets the next one


class TimeLimitError(Exception):
    """The body of time_limit() was still running at its end; the cause shows where."""


class _AlarmError(BaseException):
    """Not an Exception, so that `except Exception` in the body does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitError in the body after so many seconds; 0 never does.

    It works by a signal: in the main thread only (elsewhere there is no limit), and between Python instructions, so it
    cannot end a single call into C that never returns. A timer that was already running is put back.
    """
    if seconds <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_armed = True

    def ring(_number: int, _frame: FrameType | None) -> None:
        if is_armed:
            raise _AlarmError

    started = time.monotonic()
    previous_handler = signal.signal(signal.SIGALRM, ring)
    outer_s, outer_repeat_s = signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S)
    try:
        yield
        is_armed = False
    except _AlarmError as alarm:
        is_armed = False
        raise TimeLimitError(f"no result after {seconds:g} s") from alarm
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        if outer_s:
            left_s = max(outer_s - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left_s, outer_repeat_s)
