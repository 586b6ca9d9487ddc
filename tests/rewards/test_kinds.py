from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from lightrl.records import Sample
from lightrl.rewards import batch_reward, group_reward, isolated_reward
from lightrl.rewards.scoring import Isolation, RewardKind, kind_of, reward_name


def plain(sample: Sample) -> float:
    return 0.0


async def waiting(sample: Sample, *, by: int = 1) -> float:
    return 0.0


@group_reward
def grouped(samples: Sequence[Sample]) -> list[float]:
    return []


@batch_reward
async def batched(samples: list[Sample]) -> list[float]:
    return []


@isolated_reward(timeout_s=2)
def alone(sample: Sample) -> float:
    return 0.0


class Waiting:
    async def __call__(self, sample: Sample, /) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("reward", "kind"),
    [
        (plain, RewardKind()),
        (lambda sample: 0.0, RewardKind()),
        (waiting, RewardKind(is_async=True)),
        (partial(waiting, by=2), RewardKind(is_async=True)),
        (Waiting(), RewardKind(is_async=True)),
        (grouped, RewardKind(scope="group")),
        (batched, RewardKind(scope="batch", is_async=True)),
        (alone, RewardKind(isolation=Isolation(timeout_s=2))),
    ],
)
def test_how_a_reward_is_called(reward: Any, kind: RewardKind) -> None:
    assert kind_of(reward) == kind


def test_names() -> None:
    assert [reward_name(item) for item in (plain, partial(waiting, by=1), Waiting())] == ["plain", "waiting", "Waiting"]


def two(prompt: str, response: str) -> float:
    return 0.0


def none() -> float:
    return 0.0


def keyword(sample: Sample, *, by: int) -> float:
    return 0.0


def listed(samples: list[Sample]) -> float:
    return 0.0


def sequenced(samples: Sequence[Sample]) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            two,
            r"'two' has the parameters \(prompt: 'str', response: 'str'\) -> 'float': it is called with one",
        ),
        (none, "called with one argument, a Sample .*too many positional arguments"),
        (keyword, "missing a required .*argument: 'by'"),
        (
            listed,
            r"takes list\[Sample\], and it is called with one Sample. Mark it with @group_reward .* @batch_reward",
        ),
        (sequenced, r"takes Sequence\[Sample\], and it is called with one Sample"),
    ],
)
def test_a_wrong_signature_is_told_at_once(reward: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind_of(reward)


def test_marks_that_contradict_are_refused() -> None:
    def single(sample: Sample) -> float:
        return 0.0

    with pytest.raises(ValueError, match="'single' takes one Sample, but @batch_reward has it called with a list"):
        kind_of(batch_reward(single))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'single' is marked as a batch and as a group reward"):
        kind_of(group_reward(single))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'batched' is isolated: .* neither async nor a batch reward"):
        kind_of(isolated_reward()(batched))
    del batched.isolation  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit", [0, -1, "4", 2.5])
def test_a_limit_of_an_async_reward_that_is_no_count_is_refused(limit: object) -> None:
    async def slow(sample: Sample) -> float:
        return 1.0

    slow.max_concurrency = limit  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"'slow' has max_concurrency .*: it must be a whole number from 1 on, or None"
    ):
        kind_of(slow)


@pytest.mark.parametrize("limit", [1, np.int64(4), None])
def test_a_limit_of_an_async_reward_is_kept(limit: int | None) -> None:
    async def slow(sample: Sample) -> float:
        return 1.0

    slow.max_concurrency = limit  # type: ignore[attr-defined]
    assert kind_of(slow).max_concurrency == limit
