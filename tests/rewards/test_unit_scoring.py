"""Rewards of groups and batches: what a call sees, and what a failure costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import pytest
from reward_samples import answered, run

from lightrl.records import Sample
from lightrl.rewards import RewardError, batch_reward, group_reward, score


def test_a_group_reward_sees_each_prompts_samples_together() -> None:
    @group_reward
    def rank(samples: Sequence[Sample]) -> list[float]:
        order = sorted(len(sample.text) for sample in samples)
        return [order.index(len(sample.text)) for sample in samples]

    samples = [answered(text, position=place) for place, text in [(4, "aaa"), (4, "a"), (7, "b"), (7, "bb"), (7, "b")]]
    assert score(rank, samples) == [1.0, 0.0, 0.0, 2.0, 0.0]
    assert score(rank, []) == []


def test_a_group_that_fails_fails_whole_and_alone() -> None:
    @group_reward
    def picky(samples: Sequence[Sample]) -> list[float]:
        return [float(sample.text) for sample in samples]

    outcomes, budget = run(picky, [answered("1"), answered("x"), answered("2", position=1)], max_failures=2)
    assert [isinstance(item, RewardError) for item in outcomes] == [True, True, False]
    assert len(budget.failures) == 2


def test_a_failing_batch_is_tried_singly_where_failures_are_allowed() -> None:
    @batch_reward
    def numbers(samples: Sequence[Sample]) -> list[float]:
        return [float(sample.text) for sample in samples]

    @batch_reward
    async def async_numbers(samples: Sequence[Sample]) -> list[float]:
        return numbers(samples)  # type: ignore[return-value]

    for reward in (numbers, async_numbers):
        outcomes, budget = run(reward, [answered("1"), answered("x"), answered("2")], max_failures=1)
        assert [outcomes[0], outcomes[2]] == [1.0, 2.0]
        assert "'x'" in str(outcomes[1])
        assert len(budget.failures) == 1
        with pytest.raises(RewardError, match="on 3 samples, first prompt 10"):
            run(reward, [answered("1"), answered("x"), answered("2")])


def test_a_generator_without_an_end_is_refused() -> None:
    @batch_reward
    def endless(samples: Sequence[Sample]) -> Any:
        return repeat(1.0)

    @batch_reward
    async def endless_async(samples: Sequence[Sample]) -> Any:
        return repeat(1.0)

    @group_reward
    def lazy(samples: Sequence[Sample]) -> Any:
        return (float(sample.text) for sample in samples)

    samples = [answered("1"), answered("2")]
    for reward in (endless, endless_async):
        with pytest.raises(RewardError, match="returned 3 numbers for 2 samples"):
            run(reward, samples)
    assert score(lazy, samples) == [1.0, 2.0]


def test_a_unit_has_the_time_of_all_its_samples() -> None:
    @group_reward
    def slow(samples: Sequence[Sample]) -> list[float]:
        time.sleep(0.5)
        return [1.0] * len(samples)

    outcomes, _ = run(slow, [answered("a")] * 6 + [answered("b", position=1)] * 2, max_failures=2, timeout_s=0.15)
    assert outcomes[:6] == [1.0] * 6
    assert all("no result after 0.3 s on 2 samples" in str(item) for item in outcomes[6:])


def test_too_many_or_too_few_numbers_fail_every_sample() -> None:
    @batch_reward
    def as_told(samples: Sequence[Sample]) -> list[float]:
        return [1.0] * int(samples[0].text)

    for count in (1, 3):
        outcomes, budget = run(as_told, [answered(str(count)), answered("1")], max_failures=2)
        assert [f"returned {count} numbers for 2 samples: one for each" in str(item) for item in outcomes] == [True] * 2
        assert len(budget.failures) == 2


def test_a_call_for_several_samples_returns_a_list() -> None:
    @batch_reward
    def without_return(samples: Sequence[Sample]) -> Any:
        return None

    @group_reward
    async def one_number(samples: Sequence[Sample]) -> Any:
        return 1.0

    @batch_reward
    def generator(samples: Sequence[Sample]) -> Any:
        return (float(sample.text) for sample in samples)

    samples = [answered("1"), answered("2")]
    for reward, shown in ((without_return, "None"), (one_number, "1.0")):
        outcomes, _ = run(reward, samples, max_failures=2)
        text = f"returned {shown} for 2 samples. A group or batch reward must return a list with a number, or None, for"
        assert [text in str(item) for item in outcomes] == [True] * 2
    assert run(generator, samples)[0] == [1.0, 2.0]


def test_a_bad_sample_of_two_costs_only_itself() -> None:
    @batch_reward
    def numbers(samples: Sequence[Sample]) -> list[float]:
        return [float(sample.text) for sample in samples]

    outcomes, budget = run(numbers, [answered("x"), answered("2")], max_failures=1)
    assert outcomes[1] == 2.0
    assert len(budget.failures) == 1
    assert run(numbers, [])[0] == []


def test_a_reward_may_change_its_list() -> None:
    @batch_reward
    def emptying(samples: Any) -> list[float]:
        return [float(samples.pop(0).text) for _ in range(len(samples))]

    assert score(emptying, [answered("1"), answered("2")]) == [1.0, 2.0]
