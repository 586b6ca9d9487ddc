"""Rewards that an episode asks for: of one sample, of a group, composed, async, failing; and work that is shared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_samples import made_sample

from lightrl.records import Prompt, Sample
from lightrl.rewards.reward_set import RewardSet, WeightedReward
from lightrl.rewards.scoring import RewardError, group_reward
from lightrl.rollout.siblings import Siblings

PROMPT = Prompt(index=0, text="1=", token_ids=(3, 13))


def sample(index: int, text: str) -> Sample:
    ids = tuple(range(len(text)))
    return made_sample(prompt=PROMPT, position=4, sample_index=index, response_ids=ids, text=text)


def length(one: Sample) -> float:
    return len(one.text)


async def slow_length(one: Sample) -> float:
    await asyncio.sleep(0.01)
    return len(one.text)


@group_reward
def is_longest(group: Sequence[Sample]) -> list[float]:
    return [float(len(one.text) == max(len(other.text) for other in group)) for one in group]


def picky(one: Sample) -> float:
    raise RuntimeError("no opinion")


def rewards(**named: Any) -> RewardSet:
    return RewardSet([WeightedReward(label=name, weight=2.0, reward=item) for name, item in named.items()])


@group_reward
def place(group: Sequence[Sample]) -> list[float]:
    return [float(index) for index in range(len(group))]


def ask(given: RewardSet, *texts: str, size: int | None = None) -> list[float]:
    async def all_of_them() -> list[float]:
        siblings = Siblings(size or len(texts), given)

        async def episode(index: int, text: str) -> float:
            await asyncio.sleep(0.001 * (len(texts) - index))
            try:
                return await siblings.reward(sample(index, text))
            finally:
                await siblings.leave()

        async def silent() -> None:
            await asyncio.sleep(0.02)
            await siblings.leave()

        others = [silent() for _ in range((size or len(texts)) - len(texts))]
        found = await asyncio.wait_for(
            asyncio.gather(*[episode(index, text) for index, text in enumerate(texts)], *others), 20
        )
        return found[: len(texts)]

    try:
        return asyncio.run(all_of_them())
    finally:
        given.close()


def test_a_reward_of_one_sample_is_weighted() -> None:
    assert ask(rewards(length=length), "ab", "abc") == [4.0, 6.0]


def test_a_reward_of_groups_waits_for_the_siblings_that_still_run() -> None:
    assert ask(rewards(is_longest=is_longest), "ab", "abc", "a") == [0.0, 2.0, 0.0]
    assert ask(rewards(is_longest=is_longest), "ab", "abc", size=4) == [0.0, 2.0]  # two never ask


def test_rewards_are_composed_and_may_be_async() -> None:
    assert ask(rewards(slow=slow_length, longest=is_longest), "ab", "abc") == [4.0, 8.0]
    given = rewards(slow=slow_length)
    assert asyncio.run(Siblings(1, given).reward(sample(0, "ab"))) == 4.0
    assert asyncio.run(Siblings(1, given).reward(sample(0, "abc"))) == 6.0  # its loop outlives that of the episodes
    assert given.run("slow", [sample(0, "a")], _budget()) == [1.0]  # and the run's own scoring goes on with it
    given.close()


def _budget() -> Any:
    from lightrl.rewards.scoring import FailureBudget

    return FailureBudget()


def test_a_reward_that_raises_is_the_episodes_error() -> None:
    with pytest.raises(RewardError, match="'picky' raised RuntimeError: no opinion"):
        ask(rewards(picky=picky), "a")
    with pytest.raises(RewardError, match="no opinion"):
        ask(rewards(picky=picky, longest=is_longest), "a", "b")


def test_a_reward_that_does_not_apply_is_left_out() -> None:
    def of_short_ones(one: Sample) -> float | None:
        return 5.0 if len(one.text) < 2 else None

    assert ask(rewards(short=of_short_ones, length=length), "a", "abc") == [12.0, 6.0]
    with pytest.raises(RewardError, match=r"'short' returned None on prompt 0"):
        ask(rewards(short=of_short_ones), "abc")


def test_rewards_that_no_episode_can_ask_for_are_refused() -> None:
    class AllRanks:
        is_collective = True

        def __call__(self, samples: Sequence[Sample]) -> list[float]:
            return [0.0] * len(samples)

    with pytest.raises(ValueError, match="'everyone' is scored by all ranks together, which an episode cannot ask for"):
        ask(rewards(everyone=AllRanks()), "a")
    with pytest.raises(ValueError, match="There are no rewards here"):
        asyncio.run(Siblings(1).reward(sample(0, "a")))


def test_two_rewards_of_groups_at_a_time_are_refused() -> None:
    async def twice() -> None:
        siblings = Siblings(2, rewards(longest=is_longest))
        await asyncio.gather(*[siblings.reward(sample(0, text)) for text in ("a", "ab")])

    with pytest.raises(ValueError, match="asks for two rewards at a time"):
        asyncio.run(twice())


def test_shared_work_is_done_once_though_the_first_to_ask_is_cancelled() -> None:
    calls = []

    async def make() -> int:
        calls.append(1)
        await asyncio.sleep(0.01)
        return len(calls)

    async def all_of_them() -> list[int]:
        siblings = Siblings(3)
        first = asyncio.ensure_future(siblings.once("plan", make))
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.gather(siblings.once("plan", make), siblings.once("plan", make))

    assert asyncio.run(all_of_them()) == [1, 1]


def test_the_images_of_a_prompt_are_read_once(tmp_path: Path) -> None:
    np.save(tmp_path / "video.npy", np.zeros((2, 4, 4, 3), np.uint8))
    prompt = replace(PROMPT, videos=(str(tmp_path / "video.npy"),))
    siblings = Siblings(2)
    images, videos = siblings.media(prompt)
    assert (images, len(videos)) == ((), 1)
    assert siblings.media(prompt)[1] is videos


def test_a_group_is_compared_in_the_order_of_its_samples_whoever_asks_first() -> None:
    async def last_first() -> list[float]:
        siblings = Siblings(3, rewards(place=place))
        return await asyncio.gather(*(siblings.reward(sample(index, "x")) for index in (2, 0, 1)))

    assert asyncio.run(last_first()) == [4.0, 0.0, 2.0]  # the weight 2 times the places 2, 0 and 1


def test_a_sibling_that_is_cancelled_while_it_scores_for_all_does_not_stop_the_others() -> None:
    seen: list[int] = []

    @group_reward
    async def hanging_once(group: Sequence[Sample]) -> list[float]:
        seen.append(len(group))
        await asyncio.sleep(60 if len(seen) == 1 else 0)
        return [float(len(one.text)) for one in group]

    run = rewards(own=hanging_once)
    siblings = Siblings(3, run)

    async def episode(index: int) -> float:
        try:
            limit_s = 0.2 if index == 2 else None  # the last one to ask scores all
            return await asyncio.wait_for(siblings.reward(sample(index, "x" * index)), limit_s)
        finally:
            await siblings.leave()

    async def all_three() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*map(episode, range(3)), return_exceptions=True), 20)

    try:
        first, second, late = asyncio.run(all_three())
    finally:
        run.close()
    assert (first, second) == (0.0, 2.0)
    assert isinstance(late, asyncio.TimeoutError)
    assert seen == [3, 2]
