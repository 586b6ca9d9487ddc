"""Runs a coroutine to its end from code that is not async, even in a notebook, whose cells run inside a loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from lightrl.rewards.async_scoring import is_in_a_loop, new_event_loop, run_until_done

Result = TypeVar("Result")

_CLOSING_S = 10.0  # how long tasks that go on although they are cancelled may hold up the end
_PARTS = 20  # of a time limit


def run_to_its_end(main: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of the coroutine; an event loop that already runs waits meanwhile."""
    return _in_a_thread(main) if is_in_a_loop() else _run(main)


def _run(main: Coroutine[Any, Any, Result]) -> Result:
    """Does what asyncio.run() does, but without waiting for threads, or for long for tasks that cannot be cancelled."""
    loop = new_event_loop()
    try:
        return run_until_done(loop, main)
    finally:
        run_until_done(loop, _end_others())
        loop.close()


async def _end_others() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait([*others, loop.create_task(loop.shutdown_asyncgens())], timeout=_CLOSING_S)


def _in_a_thread(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs the coroutine in a thread with the caller's torch settings: its device, and whether it records gradients."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    records, context = torch.is_grad_enabled(), copy_context()

    def run() -> Result:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(records):
            return context.run(_run, main)

    with ThreadPoolExecutor(1, thread_name_prefix="episodes") as pool:
        return pool.submit(run).result()


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
