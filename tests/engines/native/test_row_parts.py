import numpy as np
import pytest

from lightrl.engines.native.row_parts import RowPart, at_positions, cut, num_read, sorted_rows


def test_rows_are_cut_where_it_saves_most():
    positions = np.array([99, 99, 9, 9, 9, 9])
    # read as a whole 6 * 100 = 600 positions, cut 2 * 100 + 4 * 10 = 240
    parts = cut(positions, least_saved=300)
    assert parts == [RowPart(0, 2, 99), RowPart(2, 6, 9)]
    assert num_read(parts) == 240
    assert cut(positions, least_saved=361) == [RowPart(0, 6, 99)]  # it would save 360


def test_parts_are_cut_again_as_long_as_it_pays():
    positions = np.array([400, 100, 100, 10, 10, 10, 10])
    # 7 * 400; then 400 + 6 * 100, saving 1800; then 400 + 2 * 100 + 4 * 10, saving 360; then nothing
    assert cut(positions, 300) == [RowPart(0, 1, 400), RowPart(1, 3, 100), RowPart(3, 7, 10)]
    assert cut(positions, 361) == [RowPart(0, 1, 400), RowPart(1, 7, 100)]


def test_a_long_row_in_the_middle_or_at_the_end():
    # 4 * 50; a cut before or behind the row leaves 2 * 5 + 2 * 50 at best
    assert cut(np.array([5, 5, 50, 5]), 40) == [RowPart(0, 2, 5), RowPart(2, 3, 50), RowPart(3, 4, 5)]
    assert cut(np.array([5, 5, 50]), 40) == [RowPart(0, 2, 5), RowPart(2, 3, 50)]
    assert cut(np.array([7]), 1) == [RowPart(0, 1, 7)]
    assert cut(np.array([7, 7, 7]), 1) == [RowPart(0, 3, 7)]


def test_parts_follow_their_rows():
    assert at_positions([RowPart(0, 1, 9), RowPart(1, 3, 4)], np.array([10, 3, 5])) == [
        RowPart(0, 1, 10),
        RowPart(1, 3, 5),
    ]
    assert at_positions([], np.array([10])) == []


def test_rows_are_sorted_when_that_saves_more_than_it_copies():
    # mixed: 4 * 100 as one part is read at best in 300 (10 apart, or both ends); sorted 2 * 100 + 2 * 10
    mixed = np.array([100, 10, 100, 10])
    assert sorted_rows(mixed, 50).tolist() == [0, 2, 1, 3]
    assert sorted_rows(np.sort(mixed)[::-1], 50) is None
    assert sorted_rows(mixed, 200) is None
    nearly = np.array([1000] * 30 + [990, 1000, 10])
    assert sorted_rows(nearly, 1) is None  # saves 10 positions a step, for 2000 copied


@pytest.mark.parametrize("seed", range(20))
def test_parts_hold_every_row_once_and_read_all_that_it_has(seed):
    generator = np.random.default_rng(seed)
    positions = generator.lognormal(3, 1.5, size=generator.integers(1, 60)).astype(np.int64)
    order = sorted_rows(positions, 20)
    assert order is None or sorted(order.tolist()) == list(range(len(positions)))
    parts = cut(positions if order is None else positions[order], 20)
    assert [part.start for part in parts] == [0, *[part.stop for part in parts[:-1]]]
    assert parts[-1].stop == len(positions)
    assert num_read(parts) <= len(positions) * (positions.max() + 1)
