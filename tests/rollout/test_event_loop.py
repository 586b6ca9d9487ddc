import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
import torch

from lightrl.rollout.event_loop import LoopThread, awaited_in_time, episodes_loop, run_episodes, run_to_its_end

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


async def leaves() -> None:
    sys.exit(3)


def test_exit_in_a_task_is_an_error_of_what_awaits_it_and_stops_nothing_else() -> None:
    async def told() -> str:
        try:
            await asyncio.gather(leaves())
        except SystemExit as error:
            return f"exit {error.code}"
        return "nothing"

    async def main() -> list[str]:
        return await asyncio.gather(told(), asyncio.sleep(0.05, "the other"))

    assert run_to_its_end(main()) == ["exit 3", "the other"]
    with pytest.raises(SystemExit, match="3"):
        run_to_its_end(leaves())


def test_a_signal_whose_handler_exits_ends_a_loop_that_waits() -> None:
    former = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(4))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(SystemExit, match="4"):
            run_to_its_end(asyncio.sleep(30))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, former)


def test_a_thread_that_never_returns_delays_neither_the_end_nor_that_of_the_process() -> None:
    program = """
import asyncio, time
from lightrl.rollout.event_loop import awaited_in_time, run_to_its_end

async def main():
    asyncio.ensure_future(asyncio.to_thread(time.sleep, 3600))
    await asyncio.sleep(0.01)

run_to_its_end(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_result_and_an_error_come_out_of_to_thread() -> None:
    async def main() -> list[object]:
        calls = [asyncio.to_thread(int, text) for text in ("7", "seven")]
        return await asyncio.gather(*calls, return_exceptions=True)

    value, error = run_to_its_end(main())
    assert value == 7
    assert isinstance(error, ValueError)


def test_a_task_that_cannot_be_cancelled_delays_the_end_only_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.rollout.event_loop._CLOSING_S", 0.1)

    async def goes_on() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async def main() -> float:
        left = asyncio.ensure_future(goes_on())
        await asyncio.wait([left], timeout=0.01)
        return time.monotonic()

    assert time.monotonic() - run_to_its_end(main()) < 30


def test_a_task_that_is_left_behind_can_clean_up() -> None:
    ended: list[str] = []

    async def other() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            ended.append("cleaned up")

    async def main() -> None:
        left = asyncio.ensure_future(other())
        await asyncio.wait([left], timeout=0.01)

    run_to_its_end(main())
    assert ended == ["cleaned up"]


async def loop_and_task(ended: list[str]) -> tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]:
    async def other() -> None:
        try:
            await asyncio.sleep(0.05)
            ended.append("went on")
        except asyncio.CancelledError:
            ended.append("cancelled")

    left = asyncio.ensure_future(other())
    await asyncio.wait([left], timeout=0)
    return asyncio.get_running_loop(), left


def test_episodes_share_a_loop_that_is_kept_with_what_they_leave_behind() -> None:
    ended: list[str] = []
    loop, left = run_episodes(loop_and_task(ended))
    assert loop is episodes_loop()
    assert ended == []
    run_episodes(asyncio.wait_for(left, 30))  # type: ignore[arg-type]
    assert ended == ["went on"]

    async def cell() -> asyncio.AbstractEventLoop:
        return run_episodes(loop_and_task(ended))[0]

    assert asyncio.run(cell()) is loop  # in a thread, as in a notebook


def test_an_error_ends_what_the_episodes_have_left_behind_but_not_the_loop() -> None:
    ended: list[str] = []
    loop, _ = run_episodes(loop_and_task(ended))
    with pytest.raises(KeyError, match="a mistake"):
        run_episodes(broken())
    assert ended == ["cancelled"]
    assert run_episodes(loop_and_task(ended))[0] is loop


def test_the_end_of_the_process_lets_what_is_left_behind_clean_up() -> None:
    program = """
import asyncio
from lightrl.rollout.event_loop import run_episodes

async def other():
    try:
        await asyncio.sleep(3600)
    finally:
        print("cleaned up", flush=True)

async def main():
    main.left = asyncio.ensure_future(other())
    await asyncio.sleep(0)

run_episodes(main())
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("cleaned up\n", "")


@pytest.mark.timeout(30)
def test_a_thread_of_its_own_goes_on_while_the_callers_loop_stands_still() -> None:
    thread, beats = LoopThread("beats"), list[int]()

    async def beat() -> None:
        while True:
            beats.append(len(beats))
            await asyncio.sleep(0.01)

    async def main() -> None:
        beating = asyncio.ensure_future(thread.run(beat()))
        await asyncio.sleep(0.02)
        before = len(beats)
        time.sleep(0.5)  # as while a model trains
        assert len(beats) > before + 5
        with pytest.raises(RuntimeError, match="it called exit"):
            await thread.run(leaves())
        beating.cancel()
        await asyncio.wait([beating])
        await thread.run(asyncio.sleep(0.05))
        after = len(beats)
        await thread.run(asyncio.sleep(0.1))
        assert len(beats) == after

    asyncio.run(main())


async def stubborn(seconds: float) -> list[str]:
    seen = []
    task = asyncio.current_task()
    try:
        with awaited_in_time(seconds):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                seen.append("swallowed")
            assert asyncio.current_task() is task
            await asyncio.sleep(30)
    except TimeoutError as error:
        seen.append(str(error))
    await asyncio.sleep(2 * seconds)  # no further cancellation
    return seen


@pytest.mark.timeout(30)
def test_the_time_is_over_for_code_that_swallows_it_once() -> None:
    assert asyncio.run(stubborn(0.1)) == ["swallowed", "no result after 0.1 s"]


async def cancelled_from_outside() -> None:
    running = asyncio.ensure_future(stubborn(30))
    for _ in range(2):
        await asyncio.sleep(0.01)
        running.cancel()
    await running


@pytest.mark.timeout(30)
def test_a_cancellation_by_others_is_no_time_out() -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled_from_outside())


async def stands_still() -> str:
    with awaited_in_time(0.5):
        asyncio.get_running_loop().call_later(0.05, time.sleep, 1)
        await asyncio.sleep(0.2)
    return "in time"


@pytest.mark.timeout(30)
def test_time_in_which_the_loop_stands_still_does_not_count() -> None:
    assert asyncio.run(stands_still()) == "in time"


def test_each_thread_has_a_loop_for_its_episodes() -> None:
    """Two engines in threads of one process may both run episodes."""

    async def loop_of_the_caller() -> asyncio.AbstractEventLoop:
        await asyncio.sleep(0.2)
        return asyncio.get_running_loop()

    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(run_episodes, loop_of_the_caller()) for _ in range(2)]
        assert first.result() is not second.result()
    assert run_episodes(loop_of_the_caller()) is run_episodes(loop_of_the_caller())
