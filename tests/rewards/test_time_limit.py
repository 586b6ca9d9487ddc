from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import pytest

from lightrl.rewards.scoring import TimeLimitError, time_limit


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
        assert 0.3 < rung[0] - started < 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)


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
