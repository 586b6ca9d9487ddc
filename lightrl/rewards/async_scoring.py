"""Runs an async reward over samples, many calls at a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from lightrl.forked import end_child
from lightrl.records import Sample
from lightrl.rewards.scoring import (
    FailureBudget,
    Outcome,
    RewardError,
    RewardKind,
    ScoringLimits,
    failed,
)
from lightrl.rewards.time_limit import TimeLimitError, time_limit
from lightrl.rewards.unit_scoring import UnitRunner, listed
from lightrl.torch_settings import settings_kept

Result = TypeVar("Result")

_STOP_S = 5.0  # how long to wait for a call that blocks the loop


async def without_exit(call: Awaitable[Result]) -> Result:
    """Awaits a user's call and turns exit() in it into an error; exit() would stop the loop and everything on it."""
    process = os.getpid()
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"it called exit({error.code!r})") from error
    finally:
        if os.getpid() != process:
            end_child(process)


class _DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """The threads of asyncio.to_thread(): one that never returns blocks neither other calls nor the end of the run."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Result]:
        """Runs the call in a thread of its own, whose number is as little limited as that of the episodes."""
        done: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    done.set_exception(error)

        threading.Thread(target=run, name=f"thread of {getattr(fn, '__name__', '')}", daemon=True).start()
        return done


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop for users' code, whose threads end with the process."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_DaemonThreads())
    return loop


def run_until_done(loop: asyncio.AbstractEventLoop, main: Awaitable[Result]) -> Result:
    """Runs the loop until main is done; exit() in another task is an error of that task, not the end of the loop."""
    task = asyncio.ensure_future(main, loop=loop)
    while True:
        try:
            return loop.run_until_complete(task)
        except SystemExit as error:
            if task.done():
                return task.result()
            if not _is_of_a_task(error):
                raise


def run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop of a thread until stop(); exit() in a task is an error of that task."""
    while True:
        try:
            return loop.run_forever()
        except SystemExit as error:
            if not _is_of_a_task(error):
                raise


def _is_of_a_task(error: SystemExit) -> bool:
    """Returns whether a task or callback called exit(), and not the handler of a signal while the loop waited."""
    return any(frame.f_code is asyncio.Handle._run.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


class AsyncRunner(UnitRunner):
    """Awaits the calls of an async reward, all on one event loop, because a user's session may depend on its loop."""

    def __init__(self, reward: Any, kind: RewardKind, limits: ScoringLimits, name: str) -> None:
        super().__init__(reward, kind, limits, name)
        self._concurrency = min(limits.concurrency, kind.max_concurrency or limits.concurrency)
        self._gate = asyncio.Semaphore(self._concurrency)  # for all calls on the loop: an episode scores one sample
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None  # runs the loop once a reward was asked for in another loop

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns an outcome for each sample; raises RewardError as soon as the budget is exceeded."""
        units = self.units(samples)
        if not units:
            return []
        loop = self._open_loop()
        # In a notebook's cell, or where no alarm rings.
        if is_in_a_loop() or threading.current_thread() is not threading.main_thread():
            self._start_thread(loop)
        # The time limits of the calls cannot end a call that blocks the loop itself.
        limit_s = self.limits.timeout_s * (1 + math.ceil(len(units) / self._concurrency)) * max(map(len, units))
        try:
            with settings_kept(f"The reward {self.name!r}"), time_limit(limit_s):
                if self._thread is not None:
                    running = asyncio.run_coroutine_threadsafe(self._gather(units, budget), loop)
                    outcomes = running.result(limit_s or None)
                else:
                    outcomes = run_until_done(loop, self._gather(units, budget))
        except (TimeLimitError, concurrent.futures.TimeoutError) as error:
            raise self._blocks() from error
        return [outcome for unit in outcomes for outcome in unit]

    async def arun(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Does what run() does, when called from another event loop; the reward stays on its own loop, in a thread."""
        loop = self._open_loop()
        self._start_thread(loop)
        units = self.units(samples)
        running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._gather(units, budget), loop))
        try:
            await self._wait(running, loop, self.limits.timeout_s * max(map(len, units), default=1))
            return [outcome for unit in running.result() for outcome in unit]
        finally:
            running.cancel()

    def close(self) -> None:
        """Cancels what still runs, and closes the event loop."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None:
            return
        if thread is not None:
            ending = asyncio.run_coroutine_threadsafe(_cancel_all(), loop)
            ending.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
            thread.join(_STOP_S)
        if not loop.is_running():
            loop.close()

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop, self._gate = new_event_loop(), asyncio.Semaphore(self._concurrency)
        return self._loop

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=run_for_ever, args=(loop,), name=f"reward {self.name}", daemon=True)
            self._thread.start()

    async def _wait(self, running: asyncio.Future[Any], loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """Waits until the future is done; raises RewardError if a call blocks the loop, which no time limit ends."""
        while not (await asyncio.wait([running], timeout=limit_s or None))[0]:
            answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
            if not (await asyncio.wait([running, answer], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                raise self._blocks()

    def _blocks(self) -> RewardError:
        return RewardError(f"The reward {self.name!r} is async and blocks: it waits for something without await.")

    async def _gather(self, units: list[list[Sample]], budget: FailureBudget) -> list[list[Outcome]]:
        async def run_one(unit: list[Sample]) -> list[Outcome]:
            async with self._gate:
                outcomes = await self._await_call(unit, budget)
            budget.record(outcomes)
            return outcomes

        tasks = [asyncio.ensure_future(run_one(unit)) for unit in units]
        try:
            return await asyncio.gather(*tasks)
        finally:  # if one exceeds the budget, the others are not waited for
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _await_call(self, unit: list[Sample], budget: FailureBudget) -> list[Outcome]:
        timeout_s = self.limits.timeout_s * len(unit)
        call = self.reward(unit[0] if self.kind.scope == "sample" else [*unit])
        try:
            returned = await _in_time(without_exit(call), timeout_s)
            values = [returned] if self.kind.scope == "sample" else listed(returned, len(unit))
        except Exception as error:
            if self.goes_on_singly(unit, budget):
                return [outcome for sample in unit for outcome in await self._await_call([sample], budget)]
            return [failed(self.name, unit, error)] * len(unit)
        return self.checked(unit, values)


async def _in_time(call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """Awaits a call of a reward; unlike with wait_for(), a TimeoutError of the reward itself stays what it is."""
    running = asyncio.ensure_future(call)
    try:
        await asyncio.wait([running], timeout=timeout_s or None)
        if not running.done():
            raise TimeLimitError(f"no result after {timeout_s:g} s")
        if running.cancelled():
            raise RuntimeError("it was cancelled")
        return running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _cancel_all() -> None:
    """Cancels all other tasks of the loop, because a task that is left behind makes Python print warnings."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def is_in_a_loop() -> bool:
    """Returns whether a loop runs; a function of its own keeps its exception out of the tracebacks of episodes."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
