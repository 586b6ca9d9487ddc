"""Problems of the real reasoning-gym."""

from __future__ import annotations

import sys

import pytest

from lightrl.data.prompts import load_records

pytest.importorskip("reasoning_gym")


def test_problems_are_records() -> None:
    records = load_records("reasoning_gym:chain_sum?size=3&seed=4&min_terms=2&max_terms=2")
    assert len(records) == 3
    record, where = records[0]
    assert where.startswith("reasoning_gym:chain_sum?size=3")
    assert record["task"] == "chain_sum"
    assert record["prompt"] == record["entry"]["question"]
    assert load_records("reasoning_gym:chain_sum?size=3&seed=4&min_terms=2&max_terms=2") == records
    assert load_records("reasoning_gym:chain_sum?size=3&seed=5&min_terms=2&max_terms=2") != records


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("reasoning_gym:chain_sums", "no task 'chain_sums'. Did you mean chain_sum"),
        ("reasoning_gym:chain_sum?min_terms=0", "reasoning-gym refuses it"),
        ("reasoning_gym:chain_sum?colour=red", "reasoning-gym refuses it"),
        ("reasoning_gym:chain_sum?size", "it must be name=value"),
    ],
)
def test_a_source_that_makes_no_problems_is_refused(source: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load_records(source)


def test_a_package_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r'needs reasoning_gym: pip install "lightrl\[reasoning-gym\]"'):
        load_records("reasoning_gym:chain_sum")
