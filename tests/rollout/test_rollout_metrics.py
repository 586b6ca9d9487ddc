"""pass@k against counting, and the metrics of finished groups."""

import itertools
import math
from typing import Any

import pytest
from made_samples import made_sample

from lightrl.records import Prompt, ScoredGroup
from lightrl.rewards import NO_REWARD
from lightrl.rollout.metrics import evaluate, pass_at_k


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 0), (4, 1), (5, 2), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n: int, c: int) -> None:
    for k in range(1, n + 1):
        choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_of_many_samples() -> None:
    """1 - C(190, 100) / C(200, 100) by the product over the right ones: the factors of floats would overflow."""
    missed = math.prod((100 - i) / (200 - i) for i in range(10))
    assert pass_at_k(200, 10, 100) == pytest.approx(1 - missed, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_cannot_be_drawn_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples"):
        pass_at_k(n, c, k)


def group(index: int, rewards: list[float], **fields: Any) -> ScoredGroup:
    prompt = Prompt(index=index, text="", token_ids=(1,), fields=fields)
    samples = [
        made_sample(
            prompt=prompt,
            position=index,
            sample_index=number,
            response_ids=(5,),
            turns=(0, 1)[: 1 + index],
            numbers={"tool_errors": 1.0},
        )
        for number in range(len(rewards))
    ]
    return ScoredGroup(samples=tuple(samples), rewards=tuple(rewards), step=0)


def test_groups_by_hand() -> None:
    """One of 4 right, then 2 of 4; one reward of the second failed, so 2 of 3: pass@2 is 1/2 and 1, pass@4 1 alone."""
    groups = [group(0, [1.0, 0.0, 0.0, 0.0], source="a"), group(1, [1.0, 1.5, NO_REWARD, 0.0], source="b")]
    found = evaluate(groups, ks=(1, 2, 4), source_field="source")
    assert found == pytest.approx(
        {
            "accuracy": (1 / 4 + 2 / 3) / 2,
            "avg@4": (1 / 4 + 2 / 3) / 2,
            "reward": (1 / 4 + 2.5 / 3) / 2,
            "pass@1": (1 / 4 + 2 / 3) / 2,
            "pass@2": (1 / 2 + 1) / 2,
            "pass@4": 1.0,
            **{"a/accuracy": 1 / 4, "a/avg@4": 1 / 4, "a/reward": 1 / 4},
            **{"a/pass@1": 1 / 4, "a/pass@2": 1 / 2, "a/pass@4": 1.0},
            **{"b/accuracy": 2 / 3, "b/avg@4": 2 / 3, "b/reward": 2.5 / 3, "b/pass@1": 2 / 3, "b/pass@2": 1.0},
            "turns": 1.5,
            "tool_errors": 8.0,
        },
        abs=1e-12,
    )


def test_nothing_to_measure_gives_no_mean() -> None:
    assert "accuracy" not in evaluate([group(0, [NO_REWARD])])
    single = evaluate([group(0, [1.0])], source_field="missing")
    assert single["other/accuracy"] == 1.0
    assert "avg@1" not in single  # that is the accuracy
    inside = evaluate([group(0, [1.0], info={"level": 3})], source_field="info.level")
    assert inside["3/accuracy"] == 1.0
