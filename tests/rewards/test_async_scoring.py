"""Async rewards: how many calls wait together, what fails, and where they may be called from."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import pytest
from reward_samples import answered, run

from lightrl.records import Sample
from lightrl.rewards import RewardError, group_reward, score
from lightrl.rewards.reward_set import make_runner
from lightrl.rewards.scoring import FailureBudget, ScoringLimits


class Crowd:
    """Counts how many calls of its reward wait at the same time, at most."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def reward(self, sample: Sample) -> float:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.02)
        self.running -= 1
        return float(sample.text)


def test_async_rewards_wait_together_up_to_the_limit() -> None:
    waiting = Crowd()
    outcomes, _ = run(waiting.reward, [answered(str(place)) for place in range(10)], concurrency=4)
    assert outcomes == [float(place) for place in range(10)]
    assert waiting.most == 4


def test_an_async_reward_keeps_its_loop_from_call_to_call() -> None:
    loops = []

    async def looping(sample: Sample) -> float:
        loops.append(asyncio.get_running_loop())
        return 0.0

    runner = make_runner(looping)
    runner.run([answered("")], FailureBudget())
    runner.run([answered("")], FailureBudget())
    runner.close()
    assert loops[0] is loops[1]


def test_exit_in_a_task_of_an_async_reward_fails_only_its_call() -> None:
    async def leave(sample: Sample) -> float:
        return sys.exit(3) if sample.text == "x" else float(sample.text)

    async def leaving(sample: Sample) -> float:
        return sum(await asyncio.gather(leave(sample)))

    def outcomes() -> list[object]:
        return run(leaving, [answered("1"), answered("x"), answered("2")], max_failures=1, timeout_s=20)[0]

    async def cell() -> list[object]:
        return outcomes()

    for first, failure, last in (outcomes(), asyncio.run(cell())):  # here, and in a thread of the reward
        assert (first, last) == (1.0, 2.0)
        assert "exit(3)" in str(failure)


def test_an_async_reward_that_blocks_is_told_so() -> None:
    async def blocking(sample: Sample) -> float:
        time.sleep(60)
        return 1.0

    with pytest.raises(RewardError, match="'mine' is async and blocks: it waits for something without await"):
        run(blocking, [answered("a")], timeout_s=0.1)


def test_past_the_budget_the_others_are_not_waited_for() -> None:
    ended = []

    async def failing(sample: Sample) -> float:
        if sample.text == "x":
            raise OSError("no connection")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(sample.text)
        return 1.0

    started = time.monotonic()
    with pytest.raises(RewardError, match="no connection"):
        run(failing, [answered("a"), answered("b"), answered("x")])
    assert ended == ["a", "b"]
    assert time.monotonic() - started < 20


def test_the_limit_holds_for_all_episodes_together() -> None:
    waiting = Crowd()
    runner = make_runner(waiting.reward, ScoringLimits(concurrency=2))

    async def episodes() -> list[object]:
        return await asyncio.gather(*(runner.arun([answered(str(place))], FailureBudget()) for place in range(6)))

    try:
        assert asyncio.run(episodes()) == [[float(place)] for place in range(6)]
        assert waiting.most == 2
        runner.close()  # ends its loop; the next call starts another
        assert asyncio.run(episodes()) == [[float(place)] for place in range(6)]
        assert waiting.most == 2
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
        time.sleep(6)
        return 1.0

    async def slow(sample: Sample) -> float:
        await asyncio.sleep(0.1)
        return 1.0

    runner = make_runner(blocking, ScoringLimits(timeout_s=0.2), name="mine")
    started = time.monotonic()
    try:
        with pytest.raises(RewardError, match="'mine' is async and blocks: it waits for something without await"):
            asyncio.run(runner.arun([answered("a")], FailureBudget()))
        assert time.monotonic() - started < 5
    finally:
        runner.close()
    patient = make_runner(slow, ScoringLimits(timeout_s=0.3, concurrency=1))
    try:  # 0.6 s in all: a call's time in the queue does not count
        assert asyncio.run(patient.arun([answered("a")] * 6, FailureBudget())) == [1.0] * 6
    finally:
        patient.close()


def test_a_reward_may_allow_fewer_calls_than_the_run() -> None:
    running, most = 0, 0

    async def one_by_one(sample: Sample) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    one_by_one.max_concurrency = 1  # type: ignore[attr-defined]
    assert run(one_by_one, [answered("a")] * 3, concurrency=4)[0] == [1.0] * 3
    assert most == 1


def test_an_async_group_has_the_time_of_its_samples_and_fails_whole() -> None:
    @group_reward
    async def slow(samples: Sequence[Sample]) -> list[float]:
        await asyncio.sleep(0.5)
        return [float(sample.text) for sample in samples]

    group = [answered("1")] * 6  # 0.15 s each
    outcomes, budget = run(slow, [*group, *[answered("x", position=1)] * 2], max_failures=2, timeout_s=0.15)
    assert outcomes[:6] == [1.0] * 6
    assert all("raised TimeLimitError: no result after 0.3 s on 2 samples" in str(item) for item in outcomes[6:])
    assert len(outcomes) == 8
    assert len(budget.failures) == 2


def test_the_call_of_a_cancelled_episode_is_cancelled() -> None:
    ended: list[str] = []

    async def waiting(sample: Sample) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(sample.text)
        return 1.0

    async def episode() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(runner.arun([answered("a")], FailureBudget()), 0.1)
        while not ended:
            await asyncio.sleep(0.01)

    runner = make_runner(waiting)
    try:
        asyncio.run(asyncio.wait_for(episode(), 20))
    finally:
        runner.close()
    assert ended == ["a"]
