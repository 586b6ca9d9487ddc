"""Tells whether a function's time grows with its input or with the square of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

_TRIES = 5
_TOO_SHORT_S = 0.05  # what takes less is no trouble, and no ratio of it means anything


def thread_seconds(function: Callable[[], object]) -> float:
    """Return the processor time of this thread alone, which a busy machine hardly changes.

    Garbage collection waits: a full one visits all objects of the process, however few `function` made.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        began = time.thread_time()
        function()
        return time.thread_time() - began
    finally:
        if collects:
            gc.enable()


def require_linear(read: Callable[[str], object], written: Callable[[int], str], count: int) -> None:
    """Fail if `read` takes far more than four times as long for four times as much of what is written.

    Four parts take 4 times as long as one if the time is linear, and 16 times if each place is searched from
    each other one. The limit is in between, and the best of some tries counts.
    """
    small, large = written(count // 4), written(count)
    ratios = []
    for _ in range(_TRIES):
        seconds = thread_seconds(lambda: read(large))
        if seconds < _TOO_SHORT_S:
            return
        ratios.append(seconds / thread_seconds(lambda: read(small)))
        if ratios[-1] < 8:
            return
    raise AssertionError(f"four times the text takes {min(ratios):.1f} times as long: {small[:80]!r}...")
