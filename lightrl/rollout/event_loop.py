"""Event loops for users' code: that of a thread's episodes, which lasts as long as the process, and others.

Coroutines are run from code that is not async, even in a notebook, whose cells run inside a loop.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, partial
from typing import Any, TypeVar

import torch

from lightrl.rewards.async_scoring import is_in_a_loop, new_event_loop, run_for_ever, run_until_done, without_exit

Result = TypeVar("Result")

_CLOSING_S = 10.0  # how long tasks that go on although they are cancelled may hold up the end
_PARTS = 20  # of a time limit


def episodes_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all episodes of this thread, in training and evaluation.

    A client that an environment or a tool keeps, such as an HTTP session, works on one loop only.
    """
    return _loop_of(os.getpid(), threading.get_ident())


@cache
def _loop_of(pid: int, thread: int) -> asyncio.AbstractEventLoop:
    loop = new_event_loop()

    def end() -> None:
        if os.getpid() == pid and not loop.is_running():
            run_until_done(loop, _end_others(loop.shutdown_asyncgens()))
            loop.close()

    atexit.register(end)
    return loop


def run_episodes(main: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of the coroutine, run on the loop of the episodes. Tasks that it leaves behind are kept."""
    run_here = partial(_run_on_kept_loop, episodes_loop())  # of this thread, even if another thread runs it
    return _in_a_thread(main, run_here) if is_in_a_loop() else run_here(main)


def _run_on_kept_loop(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Result]) -> Result:
    try:
        return run_until_done(loop, main)
    except BaseException:
        run_until_done(loop, _end_others())  # so that the episodes can clean up
        raise


def run_to_its_end(main: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of the coroutine, run on a loop of its own; a loop that already runs waits meanwhile."""
    return _in_a_thread(main, _run) if is_in_a_loop() else _run(main)


def _run(main: Coroutine[Any, Any, Result]) -> Result:
    """Does what asyncio.run() does, but without waiting for threads, or for long for tasks that cannot be cancelled."""
    loop = new_event_loop()
    try:
        return run_until_done(loop, main)
    finally:
        run_until_done(loop, _end_others(loop.shutdown_asyncgens()))
        loop.close()


async def _end_others(*closing: Coroutine[Any, Any, None]) -> None:
    """Cancels all other tasks, and waits a moment for them and for what closes something."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if waited := [*others, *map(asyncio.ensure_future, closing)]:
        await asyncio.wait(waited, timeout=_CLOSING_S)


def _in_a_thread(main: Coroutine[Any, Any, Result], run_here: Callable[[Any], Result]) -> Result:
    """Runs the coroutine in a thread with the caller's torch settings: its device, and whether it records gradients."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    records, context = torch.is_grad_enabled(), copy_context()

    def run() -> Result:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(records):
            return context.run(run_here, main)

    with ThreadPoolExecutor(1, thread_name_prefix="episodes") as pool:
        return pool.submit(run).result()


class LoopThread:
    """An event loop in a thread of its own, for what must go on while the loop of the episodes stands still.

    That loop stands still while the model trains, if episodes outlive a step, and while code blocks it.
    """

    def __init__(self, name: str) -> None:
        """Takes a name for the thread, which starts with the first call."""
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    async def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine there and returns its result; it is cancelled if its caller is."""
        running = asyncio.run_coroutine_threadsafe(without_exit(call), self._started())
        return await asyncio.wrap_future(running)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = new_event_loop()
                threading.Thread(target=run_for_ever, args=(self._loop,), name=self._name, daemon=True).start()
        return self._loop


@contextmanager
def awaited_in_time(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body, where it awaits, after the given number of seconds.

    The body stays in its task, which libraries such as anyio demand of what they have opened there. The time is
    measured in parts, so that time in which the loop stands still, as while a model trains, does not count.
    """
    loop, task, left = asyncio.get_running_loop(), asyncio.current_task(), _PARTS
    assert task is not None
    timer: asyncio.TimerHandle

    def ring() -> None:
        nonlocal timer, left
        left -= 1
        if left <= 0:  # and again with each further part, for code that swallows it
            task.cancel()
        timer = loop.call_later(seconds / _PARTS, ring)

    timer = loop.call_later(seconds / _PARTS, ring)
    try:
        yield
    except asyncio.CancelledError as error:
        if left > 0:  # somebody else has cancelled the task
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise TimeoutError(f"no result after {seconds:g} s") from error
    finally:
        timer.cancel()
