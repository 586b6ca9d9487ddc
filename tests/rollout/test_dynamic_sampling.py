"""Batches filled from scripted groups: which are kept, in which order, and what is left for the next step."""

import asyncio
import io
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from made_samples import made_sample

from lightrl.comm import Comm
from lightrl.config import DynamicSamplingConfig
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rewards import NO_REWARD
from lightrl.rewards.reward_set import FailurePolicy, RewardSet, WeightedReward
from lightrl.rewards.scoring import FailureBudget
from lightrl.rollout.dynamic_sampling import DynamicSampling

PROMPTS = [Prompt(index=place, text=f"{place}=", token_ids=(1, place)) for place in range(20)]
REWARDS = {"hard": (0.0, 0.0), "easy": (1.0, 1.0), "good": (0.0, 1.0)}


def group(kind: str, position: int, step: int) -> ScoredGroup:
    """Two samples of prompt 10 step + position."""
    samples = tuple(
        made_sample(
            prompt=PROMPTS[(10 * step + position) % 20],
            position=position,
            sample_index=place,
            response_ids=(5, 6 + place),
            sampler_logprobs=(-0.1, -1 / 3),
            versions=(step, step),
            text="x",
            prompt_ids=(1, 7, position),
            own=(True, False),
            routing=np.full((4, 1, 2), 3 + place, np.int16),
        )
        for place in range(2)
    )
    return ScoredGroup(samples=samples, rewards=REWARDS[kind], step=step, baseline=0.5)


def script(kinds: str, step: int, asked: list[tuple[int, int]]) -> Callable[[int, int], list[ScoredGroup]]:
    """Groups in their order, by the first letters of their kinds; asked collects (first, count)."""
    names = {"h": "hard", "e": "easy", "g": "good"}

    def draw(count: int, first: int) -> list[ScoredGroup]:
        asked.append((first, count))
        return [group(names[kinds[place]], place, step) for place in range(first, first + count)]

    return draw


def sampling(num_prompts: int = 4, **options: object) -> tuple[DynamicSampling, Callable[[], dict[str, float]]]:
    statistics = Statistics()
    config = DynamicSamplingConfig(enabled=True, **options)  # type: ignore[arg-type]
    made = DynamicSampling(config, prompts=PROMPTS, num_prompts=num_prompts, comm=Comm(), statistics=statistics)

    def metrics() -> dict[str, float]:
        found = statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))
        return {name.removeprefix("dynamic_sampling/"): value for name, value in found.items()}

    return made, metrics


def prompts_of(groups: list[ScoredGroup]) -> list[int]:
    return [item.samples[0].prompt.index for item in groups]


def positions_of(groups: list[ScoredGroup]) -> list[list[int]]:
    return [[sample.position for sample in item.samples] for item in groups]


def test_what_is_missing_is_drawn_until_the_batch_is_full() -> None:
    asked: list[tuple[int, int]] = []
    made, metrics = sampling(oversample=1.0)
    chosen = made.fill(0, script("hgegegg", 0, asked))
    assert asked == [(0, 4), (4, 2), (6, 1)]  # 4 missing, then 2, then 1
    assert prompts_of(chosen) == [1, 3, 5, 6]
    assert positions_of(chosen) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert metrics() == {
        "rounds": 3, "dropped_easy": 2, "dropped_hard": 1, "carried": 0, "spare": 0, "expired": 0, "fill": 1.0
    }  # fmt: skip


def test_a_group_whose_baseline_failed_takes_no_place() -> None:
    made, metrics = sampling(num_prompts=1, oversample=1.0)
    without = replace(group("good", 0, 0), baseline=NO_REWARD)
    chosen = made.fill(0, lambda count, first: [without] if first == 0 else [group("good", first, 0)])
    assert prompts_of(chosen) == [1]
    assert metrics()["rounds"] == 2


def right(sample: Sample) -> float:
    """1 in prompts below 2; 1 for the second sample of prompt 3; fails for prompt 4 but in its first sample."""
    if sample.prompt.index == 4 and sample.sample_index:
        raise ValueError("no verdict")
    return float(sample.prompt.index < 2 or (sample.prompt.index == 3 and sample.sample_index == 1))


def length(sample: Sample) -> float:
    return -0.1 * sample.sample_index


def two_rewards() -> RewardSet:
    both = [WeightedReward(label=name, weight=1.0, reward=of) for name, of in (("right", right), ("length", length))]
    return RewardSet(both, policy=FailurePolicy(max_failures=9))


@pytest.mark.parametrize("by_workflow", [False, True])  # which asks for rewards while an episode runs
@pytest.mark.parametrize(
    ("name", "kept", "easy"), [("", [0, 1, 2, 3], 0), ("length", [0, 1, 2, 3], 0), ("right", [3], 2)]
)
def test_a_named_reward_must_differ_too(name: str, kept: list[int], easy: int, by_workflow: bool) -> None:
    made, metrics = sampling(num_prompts=5, oversample=1.0, max_rounds=1, reward=name)
    rewards = two_rewards()
    made.hear(rewards)

    def draw(count: int, first: int) -> list[ScoredGroup]:
        groups = [group("good", place, 0) for place in range(count)]
        budget = FailureBudget(9)
        ask = (lambda *given: asyncio.run(rewards.arun(*given))) if by_workflow else rewards.run
        runs = [[ask(item.label, one.samples, budget) for item in rewards.rewards] for one in groups]
        sums = [rewards.combine(dict(zip(("right", "length"), run, strict=True))).rewards for run in runs]
        return [replace(one, rewards=tuple(values)) for one, values in zip(groups, sums, strict=True)]

    chosen = made.fill(0, draw)
    assert prompts_of(chosen) == kept
    assert metrics()["dropped_easy"] == easy
    assert all(one.rewards[0] != one.rewards[1] for one in chosen)  # still the sums
    assert prompts_of(made.fill(1, script("ggggg", 1, []))) == [10, 11, 12, 13, 14]  # nothing heard: by the sums alone


def test_a_group_that_the_named_reward_does_not_judge_is_kept_by_its_sums() -> None:
    """Of four prompts, the named reward does not judge the first two, and only one sample of the third."""

    def named(sample: Sample) -> float | None:
        of_prompt = {2: [1.0, None], 3: [0.0, 1.0]}.get(sample.prompt.index)
        return None if of_prompt is None else of_prompt[sample.sample_index]

    made, metrics = sampling(num_prompts=4, oversample=1.0, max_rounds=1, reward="named")
    rewards = RewardSet.of(named)
    made.hear(rewards)

    def draw(count: int, first: int) -> list[ScoredGroup]:
        groups = [group("easy" if place == 0 else "good", place, 0) for place in range(count)]
        rewards.run("named", [sample for one in groups for sample in one.samples], FailureBudget())
        return groups

    assert prompts_of(made.fill(0, draw)) == [1, 3]
    assert metrics()["dropped_easy"] == 2


@pytest.mark.parametrize(("value", "kept"), [(None, [3]), (0.0, [3]), (-1.0, [3, 4])])
def test_a_failure_of_the_named_reward_counts_as_its_number(value: float | None, kept: list[int]) -> None:
    """In prompt 4, the first sample gets 0 and the second one fails."""
    made, _ = sampling(num_prompts=5, oversample=1.0, max_rounds=1, reward="right")
    rewards = RewardSet(two_rewards().rewards, policy=FailurePolicy(max_failures=9, value=value))
    made.hear(rewards)

    def draw(count: int, first: int) -> list[ScoredGroup]:
        groups = [group("good", place, 0) for place in range(count)]
        rewards.run("right", [sample for one in groups for sample in one.samples], FailureBudget(9))
        return groups

    assert prompts_of(made.fill(0, draw)) == kept


@pytest.mark.parametrize("name", ["reward/right", "wright"])
def test_a_wrong_name_of_the_reward_that_must_differ_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"dynamic_sampling.reward '.*right' is no reward of this run .* are right, len"
    ):
        sampling(reward=name)[0].hear(two_rewards())


def test_spare_groups_come_first_in_the_next_step_and_expire() -> None:
    asked: list[tuple[int, int]] = []
    made, metrics = sampling(oversample=1.5, carry_over=1)
    assert prompts_of(made.fill(0, script("gggggg", 0, asked))) == [0, 1, 2, 3]
    assert metrics()["spare"] == 2
    chosen = made.fill(1, script("hgg", 1, asked))
    assert asked == [(0, 6), (0, 3)]  # 1.5 x 4 missing, then 1.5 x 2
    assert prompts_of(chosen) == [4, 5, 11, 12]  # what step 0 left over, then step 1's own
    assert positions_of(chosen) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert metrics()["carried"] == 2
    made.fill(2, script("gggggg", 2, asked))
    assert metrics()["spare"] == 2
    made.fill(4, script("gggggg", 4, asked))  # two steps later: more than carry_over allows
    assert asked[-1] == (0, 6)
    assert metrics()["expired"] == 2


def test_without_carry_over_spare_groups_are_gone() -> None:
    asked: list[tuple[int, int]] = []
    made, metrics = sampling(oversample=2.0, carry_over=0)
    made.fill(0, script("g" * 8, 0, asked))
    assert metrics()["spare"] == 0
    made.fill(1, script("g" * 8, 1, asked))
    assert asked == [(0, 8), (0, 8)]
    assert metrics()["carried"] == 0


@pytest.mark.parametrize(("kinds", "kept"), [("eeeeeeeeeeee", []), ("hhhhhhghhhhh", [6])])
def test_the_rounds_are_bounded_and_a_short_batch_is_told_once(
    kinds: str, kept: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    made, metrics = sampling(oversample=1.0, max_rounds=3, carry_over=0)
    with caplog.at_level(logging.WARNING):
        assert prompts_of(made.fill(0, script(kinds, 0, []))) == kept
        found = metrics()
        made.fill(1, script(kinds, 1, []))
    assert found["rounds"] == 3
    assert found["fill"] == len(kept) / 4
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith(f"Step 1: of {4 + 4 + 4 - len(kept)} prompts drawn")
    assert f"only {len(kept)} of 4 have unequal rewards" in caplog.text


def test_a_batch_that_is_just_full_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = sampling(oversample=1.0, max_rounds=1)
    with caplog.at_level(logging.WARNING):
        made.fill(0, script("gggg", 0, []))
    assert not caplog.records


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    made, _ = sampling(oversample=2.0, carry_over=2)
    made.fill(0, script("g" * 8, 0, []))
    buffer = io.BytesIO()
    torch.save(made.state_dict(), buffer)
    buffer.seek(0)
    resumed, _ = sampling(oversample=2.0, carry_over=2)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    asked: list[tuple[int, int]] = []
    assert resumed._spares[0].samples[0].own == (True, False)  # the second token came from a tool
    assert (resumed._spares[0].samples[1].routing == 4).all()  # the experts of the second sample
    assert resumed.fill(1, script("", 1, asked)) == made.fill(1, script("", 1, asked))
    assert asked == []  # four were spare


def test_spare_groups_return_to_the_ranks_that_had_them() -> None:
    """Otherwise a resumed run would sum the same numbers in another order than the run without a pause."""
    parts = [[group("good", 0, 0), group("good", 3, 0)], [], [group("good", 1, 0)]]

    def on_rank(rank: int, world: int) -> DynamicSampling:
        made, _ = sampling()
        made._comm = SimpleNamespace(rank=rank, world=world, all_gather_object=lambda _: parts)  # type: ignore[assignment]
        return made

    def resumed(world: int, state: dict[str, Any]) -> list[list[int]]:
        made = [on_rank(rank, world) for rank in range(world)]
        for one in made:
            one.load_state_dict(state)
        return [[item.samples[0].position for item in one._spares] for one in made]

    state = on_rank(0, 3).state_dict()
    assert resumed(3, state) == [[0, 3], [], [1]]
    assert resumed(2, state) == [[0, 3], [1]]
    assert resumed(3, {"spares": state["spares"]}) == [[0], [1], [3]]  # of an older version
