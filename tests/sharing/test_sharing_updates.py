"""Families keep together where they fit, and every limit counts what is computed."""

from __future__ import annotations

import pytest
from made_samples import made_sample

from lightrl.records import Experience, Prompt
from lightrl.sharing.updates import by_samples, families, family_of


def sample(position: int, index: int, prompt: int, response: int) -> Experience:
    """Returns a sample whose prompt is that of its position and whose response is its own."""
    made = made_sample(
        prompt=Prompt(index=position, text="", token_ids=(position,) * prompt),
        position=position,
        sample_index=index,
        response_ids=(100 + index,) * response,
    )
    return Experience(sample=made, reward=0.0, advantage=0.0)


def keys(parts: list[list[Experience]]) -> list[list[tuple[int, int]]]:
    return [sorted(item.key for item in part) for part in parts]


def test_a_family_counts_its_prompt_once() -> None:
    assert family_of([sample(0, index, 20, 5) for index in range(4)]).num_tokens == 20 + 4 * 5
    assert family_of([sample(0, 0, 20, 5)]).num_tokens == 25


def test_a_family_that_does_not_fit_is_halved_and_shares_less() -> None:
    items = [sample(0, index, 20, 5) for index in range(4)] + [sample(1, 0, 20, 5)]
    whole = families(items, max_tokens=40)
    assert sorted(len(family.items) for family in whole) == [1, 4]
    halves = families(items, max_tokens=39)
    assert sorted((len(family.items), family.num_tokens) for family in halves) == [(1, 25), (2, 30), (2, 30)]
    singles = families(items, max_tokens=10)  # which the packing refuses, with the limit to raise
    assert [len(family.items) for family in singles] == [1] * 5
    assert "prompt" in singles[0].label


@pytest.mark.parametrize(("limit", "wanted"), [(1, [1] * 7), (2, [2, 2, 2, 1]), (3, [3, 3, 1]), (99, [7])])
def test_micro_batches_of_so_many_samples(limit: int, wanted: list[int]) -> None:
    items = [sample(0, index, 20, 5) for index in range(4)] + [sample(1, index, 20, 5) for index in range(3)]
    parts = by_samples(items, limit)
    assert sorted(map(len, parts), reverse=True) == wanted
    assert sorted(key for part in keys(parts) for key in part) == sorted(item.key for item in items)


def test_chunks_of_a_family_stay_together() -> None:
    items = [sample(position, index, 20, 5) for position in range(2) for index in range(3)]
    assert keys(by_samples(items, 4)) == [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]
