"""maj@N by hand, and in a collector's evaluation."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest
from reward_samples import answered

from lightrl.comm import Comm
from lightrl.metrics import Statistics
from lightrl.records import ScoredGroup
from lightrl.rewards import NO_REWARD
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.text_match import exact_match
from lightrl.rollout.majority import MajorityVotes, majority_accuracy


@pytest.mark.parametrize(
    ("answers", "rewards", "accuracy"),
    [
        (["5", "5", "6"], [1.0, 1.0, 0.0], 1.0),  # most say 5, which is right
        (["5", "6", "6"], [1.0, 0.0, 0.0], 0.0),
        (["5", "6", "5", "6"], [1.0, 0.0, 1.0, 0.0], 1 / 2),  # one of the two that are tied
        (["5", "6", "7"], [1.0, 0.0, 0.0], 1 / 3),
        (["5", "6", "6", "5", "7", None], [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], 1 / 2),
        (["5", None, None], [1.0, 0.0, 0.0], 1.0),  # without an answer there is no vote
        ([None, None], [0.0, 0.0], 0.0),
        (["6", "6", "5"], [NO_REWARD, 0.0, 1.0], 1 / 2),  # without a reward neither: 6 and 5 have one each
        (["5", "5", "6"], [1.0, 0.5, 0.0], 1 / 2),  # 0.5 is not right: a right answer in the wrong form
        (["5", "6", "6"], [1.5, 0.0, 0.0], 0.0),
    ],
)
def test_the_most_frequent_answer_counts(answers: list[Hashable | None], rewards: list[float], accuracy: float) -> None:
    pairs = list(zip(answers, rewards, strict=True))
    for _ in range(5):  # in any order
        assert majority_accuracy(*zip(*pairs, strict=True)) == pytest.approx(accuracy, abs=1e-12)
        random.Random(0).shuffle(pairs)


def group(position: int, texts: list[str], answer: str, source: str) -> ScoredGroup:
    samples = [answered(text, answer, position=position, fields={"source": source}) for text in texts]
    return ScoredGroup(samples=tuple(samples), rewards=tuple(map(exact_match, samples)), step=0)


def test_prompts_weigh_the_same_and_sources_are_told_apart() -> None:
    """3 of 4 say 5; 2 say 7 and 2 say 8, so half; nothing is said."""
    groups = [
        group(0, ["5", " 5 ", "6", "5"], "5", "a"),
        group(1, ["7", "8", "7", "8"], "8", "a"),
        group(2, ["", " ", "", ""], "9", "b"),
    ]
    statistics = Statistics()
    votes = MajorityVotes(RewardSet.of(exact_match), Comm())
    votes(groups, statistics, ks=(1,), source_field="source", prefix="eval/")
    found = statistics.reduce(Comm())
    assert found["eval/maj@4"] == pytest.approx((1 + 1 / 2 + 0) / 3, abs=1e-12)
    assert found["eval/a/maj@4"] == pytest.approx(3 / 4, abs=1e-12)
    assert found["eval/b/maj@4"] == 0.0
    assert found["eval/accuracy"] == found["eval/pass@1"] == pytest.approx((3 / 4 + 1 / 2 + 0) / 3, abs=1e-12)


def test_a_prompt_without_any_reward_is_left_out() -> None:
    groups = [
        group(0, ["5", "5"], "5", "a"),
        ScoredGroup(samples=(answered("6"),) * 2, rewards=(NO_REWARD,) * 2, step=0),
    ]
    statistics = Statistics()
    votes = MajorityVotes(RewardSet.of(exact_match), Comm())
    votes(groups, statistics, ks=(), source_field="", prefix="")
    assert statistics.reduce(Comm())["maj@2"] == 1.0
