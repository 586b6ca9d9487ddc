from __future__ import annotations

import random

import pytest

from lightrl.data.balance import assign_to_ranks, imbalance


def test_imbalance_by_hand() -> None:
    # loads 6 and 2, mean 4
    assert imbalance([1, 5, 2], [0, 0, 1], 2) == 1.5
    assert imbalance([3, 3], [0, 1], 2) == 1.0
    assert imbalance([4], [0], 4) == 4.0
    assert imbalance([], [], 2) == 1.0
    assert imbalance([0, 0], [1, 1], 2) == 1.0


def test_an_assignment_within_five_percent_is_kept() -> None:
    # loads 105 and 95, mean 100: exactly 1.05. One token further, 106 and 94, is moved if anything evens it out.
    assert assign_to_ranks([55, 50, 45, 50], [0, 0, 1, 1], 2) == [0, 0, 1, 1]
    # Nor does anything move at 104 and 96, although rank 1 would have room for the 4.
    assert assign_to_ranks([100, 4, 96], [0, 0, 1], 2) == [0, 0, 1]
    moved = assign_to_ranks([56, 50, 44, 50], [0, 0, 1, 1], 2)
    assert imbalance([56, 50, 44, 50], moved, 2) == 1.0


def test_overflow_moves_and_the_rest_stays() -> None:
    # Share 20: rank 0 keeps two of its four, the others go to rank 1.
    assert assign_to_ranks([10, 10, 10, 10], [0, 0, 0, 0], 2) == [0, 0, 1, 1]
    # Share 15: rank 0 keeps 10 and rank 1 keeps 8; of the overflow 7 goes to rank 1 and 5 to rank 0.
    assert assign_to_ranks([10, 8, 7, 5], [0, 1, 0, 0], 2) == [0, 1, 1, 0]
    # Share 9: rank 0 keeps 5 + 4, rank 1 gets 3 + 3 + 3.
    assert assign_to_ranks([5, 4, 3, 3, 3], [0, 0, 0, 0, 0], 2) == [0, 0, 1, 1, 1]


def test_the_given_owners_stay_as_they_are() -> None:
    """A caller compares them with the result to see whether anything moves."""
    owners = [0, 0, 1, 1]
    assert assign_to_ranks([2, 2, 1, 1], owners, 2) != owners  # by both ways of moving samples
    assert owners == [0, 0, 1, 1]


def test_samples_are_dealt_anew_when_moving_the_overflow_is_not_enough() -> None:
    # Share 3. Rank 0 keeps one 2, rank 1 both 1s; the other 2 makes 4 and 2 wherever it goes. Dealt anew, the longest
    # first to the emptiest: 2 to rank 0, 2 to rank 1, 1 to rank 1 (a tie, its owner), 1 to rank 0.
    assert assign_to_ranks([2, 2, 1, 1], [0, 0, 1, 1], 2) == [0, 1, 1, 0]


def test_a_present_assignment_that_nothing_betters_is_kept() -> None:
    assert assign_to_ranks([9, 1], [1, 0], 2) == [1, 0]


def test_one_long_sample_is_left_alone_on_its_rank() -> None:
    assert assign_to_ranks([100, 1, 1], [0, 0, 0], 3) == [0, 1, 2]


def test_no_samples_and_a_world_of_one() -> None:
    assert assign_to_ranks([], [], 4) == []
    assert assign_to_ranks([5, 6], [0, 0], 1) == [0, 0]


@pytest.mark.parametrize("seed", range(30))
def test_random_batches_come_out_even_and_never_worse(seed: int) -> None:
    draw = random.Random(seed)
    world = draw.choice([2, 3, 8])
    lengths = [draw.randint(10, 400) for _ in range(world * 16)]
    owners = [place % world for place in range(len(lengths))]
    ranks = assign_to_ranks(lengths, owners, world)
    assert imbalance(lengths, ranks, world) <= min(1.05, imbalance(lengths, owners, world))
    assert ranks == assign_to_ranks(lengths, owners, world)


def test_few_samples_move_when_one_rank_is_too_full() -> None:
    # 8 ranks of 16 samples of 100; rank 0's are twice as long: loads 3200 and 7 x 1600, share 1800.
    owners = [place % 8 for place in range(128)]
    lengths = [200 if owner == 0 else 100 for owner in owners]
    ranks = assign_to_ranks(lengths, owners, 8)
    # Rank 0 keeps 9 of its 16 (1800); its other 7 go one to each of the others (1800).
    assert sum(rank != owner for rank, owner in zip(ranks, owners, strict=True)) == 7
    assert imbalance(lengths, ranks, 8) == 1.0


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="2 lengths and 1 ranks"):
        assign_to_ranks([1, 2], [0], 2)
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] are not all in a world of 2: 0 to 1"):
        assign_to_ranks([1, 2], [0, 2], 2)
    with pytest.raises(ValueError, match="A length is -1"):
        assign_to_ranks([1, -1], [0, 1], 2)
