"""Tiles depend on the samples alone; ranks get whole tiles."""

from __future__ import annotations

import random

from lightrl.exact.tiles import cut_tiles, deal_tiles


def test_tiles_are_runs_of_samples_in_the_order_of_their_keys() -> None:
    lengths = [((0, 0), 5), ((0, 1), 4), ((1, 0), 2), ((1, 1), 20), ((2, 0), 1)]
    # 5 + 4 = 9, and 2 more would be 11 > 10; 20 is longer than a tile and stands alone
    wanted = [[(0, 0), (0, 1)], [(1, 0)], [(1, 1)], [(2, 0)]]
    assert cut_tiles(lengths, 10) == wanted
    shuffled = random.Random(0).sample(lengths, len(lengths))
    assert cut_tiles(shuffled, 10) == wanted
    assert cut_tiles([], 10) == []
    assert cut_tiles(lengths[:3], 11) == [[(0, 0), (0, 1), (1, 0)]]  # a tile may be full


def test_every_tile_goes_to_the_rank_with_the_fewest_tokens() -> None:
    # 9 to rank 0, 8 to rank 1, 4 to rank 1 (8 < 9), 3 to rank 0 (9 < 12)
    assert deal_tiles([4, 9, 8, 3], 2) == [1, 0, 1, 0]
    assert deal_tiles([7], 3) == [0]
