from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from lightrl.algorithms.groups import groups_of

# Group 7: rewards 1, 3, 5; group -2: 4; group 30: 2, 2
IDS = torch.tensor([7, -2, 30, 7, 30, 7])
REWARDS = torch.tensor([1.0, 4.0, 2.0, 3.0, 2.0, 5.0])


def test_statistics_by_hand() -> None:
    groups = groups_of(IDS)
    assert_close(groups.means(REWARDS), torch.tensor([3.0, 4, 2, 3, 2, 3]).double(), atol=1e-12, rtol=0)
    # (4 + 0 + 4) / 2 = 4
    assert_close(groups.stds(REWARDS), torch.tensor([2.0, 0, 0, 2, 0, 2]).double(), atol=1e-12, rtol=0)
    assert groups.has_signal(REWARDS).tolist() == [True, False, False, True, False, True]
    assert groups.num_others().tolist() == [2, 0, 1, 2, 1, 2]


def test_the_order_of_samples_does_not_matter() -> None:
    order = torch.tensor([3, 5, 1, 0, 4, 2])
    mixed = groups_of(IDS[order])
    assert torch.equal(mixed.means(REWARDS[order]), groups_of(IDS).means(REWARDS)[order])


def test_no_samples() -> None:
    assert groups_of(torch.zeros(0, dtype=torch.int64)).means(torch.zeros(0)).shape == (0,)


def test_ids_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="group_ids is of torch.float32: give an integer for each sample"):
        groups_of(torch.zeros(2))
