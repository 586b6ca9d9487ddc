"""Statistics of a step do not depend on how their parts are split over ranks."""

from __future__ import annotations

import math
from typing import Any

from lightrl.exact.step_statistics import ExactStatistics
from lightrl.metrics import Statistics


class Ranks:
    """Gathers the statistics of ranks that are reduced one after the other, the last one with the result."""

    def __init__(self, others: list[Any]) -> None:
        self.others = others

    def all_gather_object(self, item: Any) -> list[Any]:
        return [*self.others.pop(0), item]


def reduced(parts: list[list[float]]) -> dict[str, float]:
    sums, extrema = [], []
    for part in parts:
        statistics = ExactStatistics()
        statistics.values("reward", part)
        for value in part:
            statistics.mean("kl", value, 3)
            statistics.add("tokens", value)
            statistics.maximum("longest", value)
        sums.append(statistics._sums)
        extrema.append(statistics._values)
    return statistics.reduce(Ranks([sums[:-1], extrema[:-1]]))


def test_a_split_changes_no_bit() -> None:
    values = [0.1, 0.2, 0.3, 1e-9, 0.7, 1e9, -1e9, 0.1]
    whole = reduced([values])
    assert whole == reduced([values[:3], values[3:]]) == reduced([[value] for value in values[::-1]])
    assert whole["reward"] == math.fsum(values) / 8
    assert whole["kl"] == math.fsum(values) / 24
    assert whole["tokens"] == math.fsum(values)
    assert whole["longest"] == 1e9
    assert list(whole) == sorted(whole)


def test_what_is_not_finite_stays_so_and_an_empty_mean_is_zero() -> None:
    statistics = ExactStatistics()
    statistics.mean("bad", math.nan, 1)
    statistics.mean("bad", 1.0, 1)
    statistics.mean("none", 0.0, 0)
    found = statistics.reduce(Ranks([[], []]))
    assert math.isnan(found.pop("bad"))
    assert found == {"none": 0.0}


def test_a_number_that_another_rank_has_counts() -> None:
    other, mine = ExactStatistics(), ExactStatistics()
    other.mean("theirs", 3.0, 2)
    mine.mean("mine", 1.0, 1)
    assert mine.reduce(Ranks([[other._sums], [other._values]])) == {"mine": 1.0, "theirs": 1.5}


def test_plain_statistics_add_the_values_up() -> None:
    statistics = Statistics()
    statistics.values("reward", [0.5, 1.0])
    assert statistics.reduce(Ranks([[]])) == {"reward": 0.75}
