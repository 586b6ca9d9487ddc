"""Targets of PPO are those of all samples in the order of their keys, whatever rank holds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightrl.comm import Comm
from lightrl.config import PPOAlgorithmConfig
from lightrl.exact.targets import ExactTokenAdvantages
from lightrl.metrics import Statistics
from lightrl.testing.tiny_training import samples


class Gathered(Comm):
    """A rank among others that hold these rows."""

    def __init__(self, others: list[Any]) -> None:
        super().__init__()
        self.others = others

    def all_gather_object(self, item: Any, group: Any = None) -> list[Any]:
        return [*self.others, item]


def targets(mine: list[Any], others: list[Any]) -> Any:
    everyones = [*mine, *others]
    values = {item.key: [0.1 * index for index in range(len(item.sample.response_ids) + 1)] for item in everyones}
    rows = [[(item, values[item.key], None) for item in others]] if others else []
    estimator = ExactTokenAdvantages(PPOAlgorithmConfig())
    return estimator.targets(mine, values, None, 0.0, Gathered(rows), Statistics())


def test_the_rank_that_holds_a_sample_changes_no_bit() -> None:
    items = [replace(item, reward=0.37 * index % 1.1) for index, item in enumerate(samples(0, 40))]
    whole = targets(items, [])
    assert whole == targets(items[5:], items[:5]) == targets([], items[::-1])
    assert set(whole.advantages) == {item.key for item in items}
