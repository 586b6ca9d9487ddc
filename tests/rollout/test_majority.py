"""maj@N by hand, and in a collector's evaluation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable
from statistics import fmean

import pytest
from reward_samples import answered

from lightrl.comm import Comm
from lightrl.metrics import Statistics
from lightrl.records import ScoredGroup
from lightrl.rewards import NO_REWARD
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.text_match import exact_match
from lightrl.rollout.majority import MajorityVotes, majority_accuracy, majority_at_k


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


@pytest.mark.parametrize(
    ("k", "accuracy"),
    [
        (1, 1 / 2),  # 5 or 5 of 5 5 6 -
        (2, 2 / 3),  # 1 for 55, 1 / 2 for 56 twice, 1 for 5- twice, 0 for 6-: 4 of 6
        (3, 3 / 4),  # 1 for 556 and for 55-, 1 / 2 for 56- twice: 3 of 4
        (4, 1.0),
    ],
)
def test_a_vote_of_fewer_is_the_mean_over_all_choices(k: int, accuracy: float) -> None:
    answers, rewards = ["5", "5", "6", None], [1.0, 1.0, 0.0, 0.0]
    assert majority_at_k(answers, rewards, k) == pytest.approx(accuracy, abs=1e-12)


def test_a_vote_of_fewer_is_that_of_all_choices_listed() -> None:
    draws = random.Random(0)
    for size in (*range(1, 9), *range(1, 9)):
        answers = [draws.choice(["5", "6", "7", "8", None]) for _ in range(size)]
        rewards = [draws.choice([0.0, 1.0, NO_REWARD] if answer == "5" else [0.0, 1.0]) for answer in answers]
        pairs = list(zip(answers, rewards, strict=True))
        for k in range(1, size + 1):
            listed = [majority_accuracy(*zip(*chosen, strict=True)) for chosen in itertools.combinations(pairs, k)]
            assert majority_at_k(answers, rewards, k) == pytest.approx(fmean(listed), abs=1e-12)


def test_a_vote_of_many_samples_is_exact_and_may_have_no_answer() -> None:
    """Of 2000 samples, half right: of 3, most are right with 1/2; alone among others that differ, an answer ties."""
    answers = ["5"] * 1000 + ["6"] * 1000
    assert majority_at_k(answers, [1.0] * 1000 + [0.0] * 1000, 3) == pytest.approx(1 / 2, abs=1e-9)
    assert majority_at_k(list(range(64)), [1.0, *[0.0] * 63], 16) == pytest.approx(16 / 64 / 16, abs=1e-12)
    assert majority_at_k([None] * 4, [0.0] * 4, 2) == 0.0
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"maj@{k} of 4 samples: k must be between 1 and the number of samples"):
            majority_at_k([None] * 4, [0.0] * 4, k)


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
    votes = MajorityVotes(RewardSet.of(exact_match), Comm(), ks=(4, 2))
    votes(groups, statistics, ks=(1,), source_field="source", prefix="eval/")
    found = statistics.reduce(Comm())
    assert found["eval/maj@4"] == pytest.approx((1 + 1 / 2 + 0) / 3, abs=1e-12)
    assert found["eval/a/maj@4"] == pytest.approx(3 / 4, abs=1e-12)
    assert found["eval/b/maj@4"] == 0.0
    # 55 three times is right and 56 three times by half: 3/4; 77 is wrong, 88 is right, and 78 four times by half
    assert found["eval/maj@2"] == pytest.approx((3 / 4 + 1 / 2 + 0) / 3, abs=1e-12)
    assert found["eval/a/maj@2"] == pytest.approx((3 / 4 + 1 / 2) / 2, abs=1e-12)
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
