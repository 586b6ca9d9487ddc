"""Rewards on several ranks: the same numbers as on one, and the same end."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from reward_samples import answered

from lightrl.comm import Comm
from lightrl.metrics import Statistics
from lightrl.records import Sample
from lightrl.rewards import RewardError, has_reward
from lightrl.rewards.reward_set import FailurePolicy, RewardSet, WeightedReward
from lightrl.rollout.collector import Scorer
from lightrl.testing import run_spmd

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "scorer_program.py"

# 2 x the number minus the length of the text; x and y fail, and one has no verdict.
EXCLUDED = [1.0, 3.0, None, 7.0, None, 11.0, 13.0, None]
# A failed reward counts as -3: 2 x -3 - 1 for x and y, 2 x -3 - 6 for unsure.
AS_MINUS_3 = [1.0, 3.0, -7.0, 7.0, -12.0, 11.0, 13.0, -7.0]


def run(folder: Path, world_size: int) -> Any:
    out = folder / f"{world_size}.json"
    run_spmd(PROGRAM, str(out), world_size=world_size, timeout_s=180)
    return json.loads(out.read_text())


def test_the_ranks_score_as_one_does(tmp_path: Path) -> None:
    one, two = run(tmp_path, 1), run(tmp_path, 2)
    for report in (one, two):
        for name in ("uneven", "shared"):
            rewards, metrics = report[f"{name} None"]
            assert rewards == EXCLUDED
            assert report[f"{name} -3.0"][0] == AS_MINUS_3
            # picky: (1 + 2 + 4 + 6 + 7) / 5; length: (1 x 7 + 6) / 8
            assert metrics == {
                "reward/failures": 2.0,
                "reward/length": 13 / 8,
                "reward/no_verdict": 1.0,
                "reward/picky": 4.0,
            }
    (alone,) = one["too many"]
    assert alone.startswith("2 rewards have failed, more than --max_reward_failures 1. The first: The reward 'picky'")
    assert two["too many"] == [alone, alone]
    for report in (one, two):
        # Minus the length; 3 x the length of "unsure", the only text to which the second reward applies, on top.
        sums, metrics = report["selective"]
        assert sums == [-1.0, -1.0, -1.0, -1.0, 12.0, -1.0, -1.0, -1.0]
        assert metrics == {
            "reward/failures": 0.0, "reward/length": 13 / 8, "reward/long_ones": 6.0, "reward/no_verdict": 0.0
        }  # fmt: skip
        assert {text.partition(" on prompt 10 ")[0] for text in report["not judged"]} == {
            "The reward 'long_ones' returned None"
        }
        # "x", "unsure" and "y" are judged by a reward of all ranks, which gives 3; the others by their number.
        sums, metrics = report["by field"]
        assert sums == [1.0, 2.0, 3.0, 4.0, 3.0, 6.0, 7.0, 3.0]
        assert metrics["reward/picky"] == 4.0  # (1 + 2 + 4 + 6 + 7) / 5
        assert metrics["reward/together"] == 3.0
        # right: d, -d, 0, 0, -d, d with d = 0.5 / (0.7071068 + 0.0001) = 0.7070068. Half of short: 0.5 d, -0.5 d, then
        # nothing, then e and -e with e = 0.5 / (1.4142136 + 0.0001) = 0.3535284. The sums: 1.0605102 (1 token),
        # -1.0605102 (2), 0 (3), 0 (4), -0.3534784 (5), 0.3534784 (6). Over 21 tokens their mean is -0.0336682 and their
        # deviation sqrt((3 x 1.1246819 + 11 x 0.1249470) / 21 - 0.0011335) = 0.4743245.
        assert [place for place, _ in sorted(report["gdpo"])] == list(range(6))
        assert [advantage for _, advantage in sorted(report["gdpo"])] == pytest.approx(
            [2.3068140, -2.1648514, 0.0709813, 0.0709813, -0.6742435, 0.8162062], abs=1e-6
        )
    assert len(two["not judged"]) == 2
    assert one["evaluated"] == two["evaluated"]
    assert one["evaluated"]["reward"] == 13 / 8  # the lengths of all texts, whichever rank has them


def test_samples_that_no_reward_judges_are_failures_and_stay_without_a_reward() -> None:
    rewards = [WeightedReward(label=name, weight=1.0, reward=lambda sample: None) for name in ("a", "b")]
    with pytest.raises(RewardError, match="No reward applies to prompt 10 .* 'a' returned None, 'b' returned None"):
        Scorer(Comm(), RewardSet(rewards)).score([answered("x")])
    statistics = Statistics()
    scorer = Scorer(Comm(), RewardSet(rewards, policy=FailurePolicy(max_failures=1)))
    assert not any(map(has_reward, scorer.score([answered("x")], statistics)))
    assert statistics.reduce(Comm()) == {"reward/failures": 1.0, "reward/no_verdict": 0.0}


def test_a_reward_that_never_judges_among_others_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def forgetful(sample: Sample) -> None:
        float(sample.text)

    rewards: list[Any] = [forgetful, lambda sample: 1.0]
    scorer = Scorer(
        Comm(), RewardSet([WeightedReward(label=f"r{i}", weight=1.0, reward=r) for i, r in enumerate(rewards)])
    )
    samples = [answered(str(place), position=place) for place in range(100)]
    with caplog.at_level(logging.WARNING):
        scorer.score(samples)
        scorer.score(samples)
        assert not caplog.records
        scorer.score(samples)
        scorer.score(samples)
    assert [record.getMessage().partition(", so")[0] for record in caplog.records] == [
        "The reward 'r0' has returned None for 300 samples in a row"
    ]


def test_the_first_failures_of_a_run_are_shown_with_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def failing(sample: Sample) -> float:
        raise OSError(f"no {sample.text}")

    rewards = RewardSet(
        [WeightedReward(label="mine", weight=1.0, reward=failing)], policy=FailurePolicy(max_failures=9)
    )
    scorer = Scorer(Comm(), rewards)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            found = scorer.score([answered(f"{step}{place}", position=place) for place in range(2)])
            assert not any(map(has_reward, found))
    shown = [record.getMessage() for record in caplog.records]
    assert [text.partition(" on prompt")[0] for text in shown] == [
        f"The reward 'mine' raised OSError: no {name}" for name in ("00", "01", "10")
    ]
    assert 'raise OSError(f"no {sample.text}")' in shown[0]
