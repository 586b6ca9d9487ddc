"""Rewards of groups and batches: what a call sees, and what a failure costs."""

from __future__ import annotations

from collections.abc import Sequence

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
