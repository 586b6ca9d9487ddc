from __future__ import annotations

import math

import pytest
import torch
from packed_tokens import sequence_index_of
from torch.testing import assert_close

from lightrl.algorithms.reward_shaping import (
    kl_penalised,
    kl_penalised_samples,
    overlong_penalty,
    rewards_at_the_end,
    samples_within,
    scaled_rewards,
    signal_samples,
)


def test_overlong_penalty_grows_over_the_buffer() -> None:
    # max 100, buffer 20: nothing up to 80, -(85 - 80) / 20, -1 at 100 and beyond
    found = overlong_penalty(torch.tensor([10, 80, 85, 90, 100, 101]), max_length=100, buffer=20)
    assert_close(found, torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0]), atol=1e-6, rtol=0)
    assert overlong_penalty(torch.tensor([90]), max_length=100, buffer=20, scale=4.0).item() == -2.0


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_outside_the_length_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer is {buffer} and max_length 100"):
        overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)


IDS = torch.tensor([3, 1, 3, 1, 8])
REWARDS = torch.tensor([0.1, 1.0, 0.1, 0.0, 1.0])


def test_only_unequal_groups_carry_a_signal() -> None:
    assert signal_samples(REWARDS, IDS).tolist() == [False, True, False, True, False]


def test_samples_by_the_mean_of_their_group() -> None:
    # Means 0.1, 0.5, 1
    assert samples_within(REWARDS, IDS, lowest=0.2, highest=0.9).tolist() == [False, True, False, True, False]
    assert samples_within(REWARDS, IDS, lowest=0.5, highest=1.0).tolist() == [False, True, False, True, True]
    with pytest.raises(ValueError, match="lowest is 1.0 and highest 0.0"):
        samples_within(REWARDS, IDS, lowest=1.0, highest=0.0)


def test_rewards_are_shifted_scaled_and_clipped_in_this_order() -> None:
    # (3 - 1) 2 = 4, held at 3; (-4 - 1) 2 = -10; (0.5 - 1) 2
    rewards = torch.tensor([3.0, -4.0, 0.5])
    assert scaled_rewards(rewards, bias=-1.0, scale=2.0, clip=3.0).tolist() == [3.0, -3.0, -1.0]
    assert torch.equal(scaled_rewards(rewards), rewards)


def test_a_reward_stands_at_the_last_trained_token() -> None:
    # The second sequence trains nothing, the third ends in a masked token.
    mask = torch.tensor([True, True, False, True, True, False])
    found = rewards_at_the_end(torch.tensor([5.0, 6.0, 7.0]), mask, sequence_index_of([2, 1, 3]))
    assert found.tolist() == [0, 5, 0, 0, 7, 0]


def test_no_trained_token_has_no_place_for_a_reward() -> None:
    mask = torch.tensor([False])
    assert rewards_at_the_end(torch.tensor([5.0]), mask, torch.tensor([0])).tolist() == [0]


def test_the_kl_is_taken_off_the_reward() -> None:
    # 1 - 0.5 x 0.4; 0 - 0.5 x -0.2; the masked one is not read
    rewards, kl = torch.tensor([1.0, 0.0, math.nan]), torch.tensor([0.4, -0.2, math.nan], requires_grad=True)
    mask = torch.tensor([True, True, False])
    found = kl_penalised(rewards, kl, mask, coef=0.5)
    assert_close(found, torch.tensor([0.8, 0.1, 0.0]), atol=1e-6, rtol=0)
    assert not found.requires_grad


def test_the_kl_of_a_sequence_is_taken_off_its_reward() -> None:
    # 1 - 0.5 (0.4 + 0.2) = 0.7; 2 - 0.5 x 0
    kl = torch.tensor([0.4, 0.2, math.nan], requires_grad=True)
    mask = torch.tensor([True, True, False])
    found = kl_penalised_samples(torch.tensor([1.0, 2.0]), kl, mask, sequence_index_of([2, 1]), coef=0.5)
    assert_close(found, torch.tensor([0.7, 2.0]), atol=1e-6, rtol=0)
    assert not found.requires_grad
