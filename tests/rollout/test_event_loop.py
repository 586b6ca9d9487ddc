import asyncio
import threading
from contextvars import ContextVar

import pytest
import torch

from lightrl.rollout.event_loop import run_to_its_end

NAME: ContextVar[str] = ContextVar("NAME", default="")


async def found() -> tuple[str, bool, bool]:
    await asyncio.sleep(0)
    return NAME.get(), torch.is_grad_enabled(), threading.current_thread() is threading.main_thread()


async def broken() -> None:
    raise KeyError("a mistake")


def test_without_a_loop_it_runs_here() -> None:
    assert run_to_its_end(found()) == ("", True, True)


def test_inside_a_loop_it_runs_in_a_thread_with_the_same_settings() -> None:
    async def cell() -> tuple[str, bool, bool]:
        NAME.set("a cell")
        with torch.no_grad():
            return run_to_its_end(found())

    assert asyncio.run(cell()) == ("a cell", False, False)


def test_an_error_comes_out_of_the_thread() -> None:
    async def cell() -> None:
        run_to_its_end(broken())

    with pytest.raises(KeyError, match="a mistake"):
        asyncio.run(cell())
