from __future__ import annotations

import dataclasses

import pytest
from reward_samples import answered

from lightrl.rewards.response_length import ResponseLength


def test_nearer_to_the_target_is_better() -> None:
    reward = ResponseLength(target=4)
    found = [reward(answered("", num_tokens=count)) for count in (0, 1, 4, 5, 8, 100)]
    assert found == [0.0, 0.25, 1.0, 0.75, 0.0, 0.0]
    assert [ResponseLength(target=1)(answered("", num_tokens=count)) for count in (0, 1)] == [0.0, 1.0]


def test_what_a_tool_wrote_has_no_length() -> None:
    """Of four tokens the policy wrote three."""
    sample = dataclasses.replace(answered("", num_tokens=4), own=(True, False, True, True))
    assert ResponseLength(target=4)(sample) == 0.75


def test_the_punishment_grows_over_the_cache_to_the_limit() -> None:
    reward = ResponseLength(limit=10, cache=4)  # from 6 to 10 tokens: (6 - length) / 4
    found = [reward(answered("", num_tokens=count)) for count in (0, 6, 7, 9, 10, 11, 50)]
    assert found == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0, -1.0]
    hard = ResponseLength(limit=10)
    assert [hard(answered("", num_tokens=count)) for count in (10, 11)] == [0.0, -1.0]
    assert [ResponseLength(limit=1)(answered("", num_tokens=count)) for count in (1, 2)] == [0.0, -1.0]


@pytest.mark.parametrize(
    "given", [{}, {"target": 3, "limit": 4}, {"limit": 4, "cache": 5}, {"target": -1}, {"cache": 1}]
)
def test_what_cannot_be_meant_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs either a target above 0, or a limit above 0"):
        ResponseLength(**given)
