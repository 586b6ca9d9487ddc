"""Async rewards: how many calls wait together, what fails, and where they may be called from."""

from __future__ import annotations

import asyncio
import time

import pytest
from reward_samples import answered, run

from lightrl.records import Sample
from lightrl.rewards import RewardError, score
from lightrl.rewards.reward_set import make_runner
from lightrl.rewards.scoring import FailureBudget, ScoringLimits


def test_the_limit_holds_for_all_episodes_together() -> None:
    running, most = 0, 0

    async def waiting(sample: Sample) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return float(sample.text)

    runner = make_runner(waiting, ScoringLimits(concurrency=2))

    async def episodes() -> list[object]:
        return await asyncio.gather(*(runner.arun([answered(str(place))], FailureBudget()) for place in range(6)))

    try:
        assert asyncio.run(episodes()) == [[float(place)] for place in range(6)]
        assert most == 2
        runner.close()  # ends its loop; the next call starts another
        assert asyncio.run(episodes()) == [[float(place)] for place in range(6)]
        assert most == 2
    finally:
        runner.close()


def test_a_time_out_of_the_rewards_own_is_no_time_limit() -> None:
    async def asking(sample: Sample) -> float:
        raise TimeoutError("the grader did not answer")

    (error,), _ = run(asking, [answered("a")], max_failures=1, timeout_s=60)
    assert isinstance(error, RewardError)
    assert "raised TimeoutError: the grader did not answer on prompt 10" in str(error)


def test_a_reward_that_is_cancelled_fails_its_own_sample() -> None:
    async def waiting(sample: Sample) -> float:
        if sample.text == "x":
            raise asyncio.CancelledError  # what a client raises that another task has closed
        return 1.0

    (error, one), _ = run(waiting, [answered("x"), answered("a")], max_failures=1)
    assert "raised RuntimeError: it was cancelled on prompt 10" in str(error)
    assert one == 1.0


def test_an_async_reward_may_be_scored_where_a_loop_runs() -> None:
    async def reading(sample: Sample) -> float:
        await asyncio.sleep(0)
        return float(sample.text)

    async def cell() -> list[float]:
        return score(reading, [answered("1"), answered("2")])

    assert asyncio.run(cell()) == [1.0, 2.0]


def test_an_episode_does_not_wait_for_a_reward_that_blocks() -> None:
    async def blocking(sample: Sample) -> float:
        time.sleep(3)
        return 1.0

    async def slow(sample: Sample) -> float:
        await asyncio.sleep(0.1)
        return 1.0

    runner = make_runner(blocking, ScoringLimits(timeout_s=0.2), name="mine")
    started = time.monotonic()
    try:
        with pytest.raises(RewardError, match="'mine' is async and blocks: it waits for something without await"):
            asyncio.run(runner.arun([answered("a")], FailureBudget()))
        assert time.monotonic() - started < 2.5
    finally:
        runner.close()
    patient = make_runner(slow, ScoringLimits(timeout_s=0.3, concurrency=1))
    try:  # 0.6 s in all: a call's time in the queue does not count
        assert asyncio.run(patient.arun([answered("a")] * 6, FailureBudget())) == [1.0] * 6
    finally:
        patient.close()
