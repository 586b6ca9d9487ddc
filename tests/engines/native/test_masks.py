import pytest
import torch

from lightrl.engines.native.cache import RowCache
from lightrl.engines.native.masks import DecodeMasks
from lightrl.engines.native.row_parts import RowPart

LIKE = torch.empty(0)


@pytest.mark.parametrize(("window", "seen"), [(None, [[0], [0, 1, 2, 3, 4]]), (3, [[0], [2, 3, 4]])])
def test_the_mask_shows_each_row_what_its_position_and_window_allow(window, seen):
    masks, cache, kv_heads = DecodeMasks([window], 2), RowCache(), 2
    cache.reserve(2, 16, 2, 16)
    cache.begin_decode(torch.tensor([0, 4]), 0, 4)
    (mask,) = masks.of(cache, window, LIKE)
    assert tuple(mask.shape) == (2 * kv_heads, 1, 8)
    assert set(mask.unique().tolist()) == {0.0, float("-inf")}
    assert [row.nonzero().flatten().tolist() for row in mask[:, 0] == 0] == [seen[0], seen[0], seen[1], seen[1]]
    cache.begin_decode(torch.tensor([4, 4]), 4, 4)
    assert (masks.of(cache, window, LIKE)[0][0, 0] == 0).nonzero().flatten().tolist() == seen[1]


@pytest.mark.parametrize("window", [None, 3])
def test_the_parts_of_a_step_have_the_rows_of_the_whole_mask(window):
    masks, cache = DecodeMasks([window], 1), RowCache()
    cache.reserve(3, 48, 3, 48)
    positions = torch.tensor([20, 2, 3])
    cache.begin_decode(positions, 2, 20)
    (whole,) = masks.of(cache, window, LIKE)
    cache.begin_decode(positions, 2, 20, [RowPart(0, 1, 20), RowPart(1, 3, 3)])
    long, short = masks.of(cache, window, LIKE)
    assert torch.equal(long, whole[:1])  # 24 positions, 20 rounded up
    assert torch.equal(short, whole[1:, :, :8])
    assert (whole[1:, :, 8:] == float("-inf")).all()
