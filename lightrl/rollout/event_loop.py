"""Runs a coroutine to its end from code that is not async, even in a notebook, whose cells run inside a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from lightrl.rewards.async_scoring import is_in_a_loop

Result = TypeVar("Result")


def run_to_its_end(main: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of the coroutine; an event loop that already runs waits meanwhile."""
    return _in_a_thread(main) if is_in_a_loop() else asyncio.run(main)


def _in_a_thread(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs the coroutine in a thread with the caller's torch settings: its device, and whether it records gradients."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    records, context = torch.is_grad_enabled(), copy_context()

    def run() -> Result:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(records):
            return context.run(asyncio.run, main)

    with ThreadPoolExecutor(1, thread_name_prefix="episodes") as pool:
        return pool.submit(run).result()
