"""A step's share of groups that were started under its own weights, by hand."""

from __future__ import annotations

import pytest

from lightrl.config import GRPOConfig
from lightrl.rollout.fresh_share import bounded_rules, num_fresh, num_steps_started, oldest_with_fresh
from lightrl.rollout.scheduler import Rules

STARTED = {0: 1, 1: 1, 2: 2, 3: 3, 4: 3, 5: 3}  # version at the start, by group; step 3 is to come


def chosen(finished: set[int], ratio: float) -> tuple[int, ...] | None:
    return oldest_with_fresh(STARTED, finished, step=3, rules=Rules(batch_size=3, on_policy_min_ratio=ratio))


def test_the_youngest_of_the_old_groups_give_way_to_fresh_ones() -> None:
    everything = set(STARTED)
    assert chosen(everything, 0.0) == (0, 1, 2)
    assert chosen(everything, 1 / 3) == (0, 1, 3)
    assert chosen(everything, 0.5) == (0, 3, 4)  # one of three is too few
    assert chosen(everything, 1.0) == (3, 4, 5)
    assert chosen({5, 2, 1}, 0.2) == (1, 2, 5)
    assert chosen({5, 4, 3}, 0.2) == (3, 4, 5)  # more than the share, where there is nothing older


def test_a_step_waits_for_a_batch_and_for_its_share() -> None:
    assert chosen({0, 1, 2}, 0.0) == (0, 1, 2)
    assert chosen({0, 1, 2}, 0.1) is None
    assert chosen({0, 3}, 0.1) is None
    assert chosen({0, 1, 2, 3}, 0.5) is None


@pytest.mark.parametrize(
    ("size", "ratio", "count"), [(20, 0.55, 11), (10, 0.7, 7), (3, 0.1, 1), (8, 0.0, 0), (8, 1, 8)]
)
def test_the_fewest_groups_of_a_share(size: int, ratio: float, count: int) -> None:
    assert num_fresh(Rules(batch_size=size, on_policy_min_ratio=ratio)) == count  # 0.55 * 20 is above 11 in floats


def test_the_last_steps_may_start_groups_of_their_own() -> None:
    config = GRPOConfig(num_prompts=3, max_steps=4, rollout_ranks=1)
    config.rollout.max_staleness = 2
    assert [num_steps_started(bounded_rules(config), version, 4) for version in range(4)] == [3, 4, 4, 4]
    config.rollout.on_policy_min_ratio = 0.5
    assert [num_steps_started(bounded_rules(config), version, 4) for version in range(4)] == [3, 4, 5, 6]
