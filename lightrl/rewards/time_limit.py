"""Time limits for the calls of rewards, by an alarm in the main thread and by a thread of its own elsewhere."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from types import FrameType
from typing import Any, TypeVar

Value = TypeVar("Value")
_REPEAT_S = 1.0  # until the next alarm, for code that swallowed one with a bare `except:`


class TimeLimitError(Exception):
    """The body of time_limit() ran out of time; the cause shows where it was."""


class _AlarmError(BaseException):
    """The alarm; not a subclass of Exception, so that `except Exception` in the body does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitError in the body after the given number of seconds; 0 sets no limit.

    It uses a signal, so it works only in the main thread (elsewhere there is no limit) and between Python instructions:
    it cannot end a single call into C that never returns. A timer that was already running is restored.
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
            signal.setitimer(signal.ITIMER_REAL, max(outer_s - (time.monotonic() - started), 1e-3), outer_repeat_s)


def call_in_time(seconds: float, function: Callable[..., Value], *arguments: Any) -> Value:
    """Returns what the function returns; raises TimeLimitError after the given number of seconds, 0 sets no limit.

    In the main thread the call is interrupted. No signal reaches another thread, such as the one that scores the groups
    of a rollout rank: the call then has a thread of its own, and goes on there alone if its time is over.
    """
    if seconds <= 0:
        return function(*arguments)
    if threading.current_thread() is threading.main_thread():
        with time_limit(seconds):
            return function(*arguments)
    return _call_beside(seconds, function, arguments)


def _call_beside(seconds: float, function: Callable[..., Value], arguments: tuple[Any, ...]) -> Value:
    returned: list[Value] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(function(*arguments))
        except BaseException as error:
            raised.append(error)

    # A daemon: a call that never returns must not keep the program from ending.
    thread = threading.Thread(target=copy_context().run, args=(run,), name="reward in time", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeLimitError(f"no result after {seconds:g} s")
    return returned[0]
