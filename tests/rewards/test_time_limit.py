from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
from reward_samples import answered

from lightrl.rewards import RewardError, batch_reward
from lightrl.rewards.reward_set import make_runner
from lightrl.rewards.scoring import FailureBudget, ScoringLimits
from lightrl.rewards.time_limit import TimeLimitError, call_in_time, time_limit


def test_a_body_that_ends_in_time_is_left_alone() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with time_limit(0.2):
        pass
    time.sleep(0.3)
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize("seconds", [0.1, 0.3])
def test_loops_sleeps_and_regular_expressions_are_stopped(seconds: float) -> None:
    import re

    def loop() -> None:
        while True:
            pass

    for body in (loop, lambda: time.sleep(60), lambda: re.match(r"(a+)+b", "a" * 40)):
        started = time.monotonic()
        with pytest.raises(TimeLimitError, match=f"no result after {seconds:g} s") as info, time_limit(seconds):
            body()
        assert seconds <= time.monotonic() - started < 30  # half of the sleep
        assert info.value.__cause__ is not None  # holds where it hung


def test_code_that_swallows_the_alarm_is_stopped_by_the_next() -> None:
    def swallow() -> None:
        try:
            time.sleep(60)
        except:  # noqa: E722
            time.sleep(60)

    started = time.monotonic()
    with pytest.raises(TimeLimitError), time_limit(0.1):
        swallow()
    assert time.monotonic() - started < 30


def test_code_that_catches_exceptions_does_not_catch_the_alarm() -> None:
    def catch() -> None:
        with suppress(Exception):
            time.sleep(60)

    with pytest.raises(TimeLimitError), time_limit(0.1):
        catch()


def test_the_bodys_own_error_comes_out() -> None:
    with pytest.raises(KeyError), time_limit(5):
        raise KeyError("mine")
    with time_limit(0):
        time.sleep(0.01)


def test_a_timer_of_the_caller_goes_on() -> None:
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        started = time.monotonic()
        with pytest.raises(TimeLimitError), time_limit(0.2):
            time.sleep(60)
        time.sleep(0.5)
        assert len(rung) == 1
        assert 0.3 < rung[0] - started < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)


def test_what_is_left_of_a_timer_of_the_caller_is_less_by_the_time_of_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter((100.0, 140.0))
    monkeypatch.setattr("lightrl.rewards.time_limit.time", SimpleNamespace(monotonic=lambda: next(clock)))
    outer = signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        with time_limit(500.0):
            pass
        left, _ = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
    assert left <= 960.0


def test_a_call_in_another_thread_sees_the_variables_of_its_caller() -> None:
    variable: ContextVar[str] = ContextVar("variable")

    def caller() -> str:
        variable.set("set")
        return call_in_time(60.0, variable.get)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(caller).result() == "set"


def test_other_threads_have_no_limit() -> None:
    found: list[str] = []

    def body() -> None:
        with time_limit(0.05):
            time.sleep(0.2)
        found.append("done")

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == ["done"]


# ---- Calls in any thread ---------------------------------------------------------------------------------------------


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=20)


def in_this_thread(function: Callable[[], Any]) -> Any:
    return function()


@pytest.mark.parametrize("where", [in_this_thread, in_a_thread])
def test_a_call_has_its_time_in_any_thread(where: Callable[[Callable[[], Any]], Any]) -> None:
    def fail() -> None:
        raise SystemExit("mine")

    assert where(lambda: call_in_time(5, max, 2, 3)) == 3
    assert where(lambda: call_in_time(0, time.sleep, 0.05)) is None
    assert where(lambda: call_in_time(5, lambda: None)) is None
    with pytest.raises(SystemExit, match="mine"):
        where(lambda: call_in_time(5, fail))
    started = time.monotonic()
    with pytest.raises(TimeLimitError, match="no result after 0.1 s"):
        where(lambda: call_in_time(0.1, time.sleep, 6))
    assert time.monotonic() - started < 5


async def waits_without_await(_: Any) -> float:
    time.sleep(6)
    return 1.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda _: time.sleep(6), "no result after 0.1 s"),
        (batch_reward(lambda samples: (time.sleep(6) for _ in samples)), "no result after 0.1 s"),
        (waits_without_await, "is async and blocks"),
    ],
    ids=["plain", "batch", "async"],
)
def test_a_reward_that_hangs_is_told_in_any_thread(reward: Any, message: str) -> None:
    """A rollout rank scores its groups in a thread, and would otherwise wait for ever."""
    runner = make_runner(reward, ScoringLimits(timeout_s=0.1))
    started = time.monotonic()
    with pytest.raises(RewardError, match=message):
        in_a_thread(lambda: runner.run([answered("")], FailureBudget()))
    assert time.monotonic() - started < 5
    runner.close()


def test_an_async_reward_that_awaits_is_scored_in_a_thread() -> None:
    async def awaits(sample: Any) -> float:
        await asyncio.sleep(0.01)
        return float(len(sample.text))

    runner = make_runner(awaits, ScoringLimits(timeout_s=5))
    assert in_a_thread(lambda: runner.run([answered("ab"), answered("c")], FailureBudget())) == [2.0, 1.0]
    runner.close()
