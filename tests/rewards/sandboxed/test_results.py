from __future__ import annotations

import math
from typing import Any

import pytest

from lightrl.rewards.sandboxed.results import is_result, value_of


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ((1, (2, [3])), [1, [2, [3]]]),
        ([(1, 2), (3, 4)], [[1, 2], [3, 4]]),
        ({1: (2,), None: True}, {"1": [2], "null": True}),
        ({1: 2}, {1: 2}),
        ({"a": {0.5: []}}, {"a": {"0.5": []}}),
        ([math.nan, math.inf, -math.inf], [math.nan, math.inf, -math.inf]),
        (1, 1.0),
        ("", ""),
    ],
)
def test_a_value_is_the_result_that_json_can_write(returned: Any, wanted: Any) -> None:
    assert is_result(returned, repr([wanted]))
    assert is_result(returned, repr(["other", wanted]))


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ((1, 2), [1, 3]),
        ((1, 2), [1, 2, 3]),
        ([], [[]]),
        ("12", ["1", "2"]),
        ({1: 2, "1": 2}, {"1": 2}),
        ({1: 2}, {"1": 3}),
        ({}, {"1": 2}),
        ({1: 2, 3: 4}, {"1": 2}),
        ({1, 2}, [1, 2]),
        (0.0, math.nan),
        (math.nan, 0.0),
        (math.inf, -math.inf),
        (None, 0),
    ],
)
def test_another_value_is_not(returned: Any, wanted: Any) -> None:
    assert not is_result(returned, repr([wanted]))


def test_a_written_value_has_no_names_but_those_of_numbers() -> None:
    assert value_of("[inf, -inf, 'a', {1: (2,)}]") == [math.inf, -math.inf, "a", {1: (2,)}]
    with pytest.raises(NameError):
        value_of("open('x')")
