import inspect
import weakref
from contextlib import nullcontext

import pytest
import torch

from lightrl.engines.native.cache import LayerStorage, RowCache, cache_name, round_up
from lightrl.engines.native.row_parts import RowPart


def test_round_up():
    assert [round_up(value) for value in (1, 32, 33)] == [32, 32, 64]


@pytest.mark.parametrize(
    ("name", "expected"), [("cache", "cache"), ("past_key_values", "past_key_values"), ("mems", "cache")]
)
def test_a_model_gets_its_cache_by_the_name_that_its_version_of_transformers_has(name, expected):
    def forward(input_ids, **kwargs): ...

    names = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in ("input_ids", name)]
    forward.__signature__ = inspect.Signature(names)  # what a decorator of transformers leaves
    assert cache_name(forward) == expected


def filled_cache():
    """Two prompts of two tokens, in rows 2 and 0; one layer, one head of size one."""
    cache = RowCache()
    cache.reserve(rows=3, positions=2, most_rows=8, most_positions=100)
    keys = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 1, 2, 1)
    cache.begin_prefill(torch.tensor([2, 0]), torch.tensor([0, 1]))
    cache.update(keys, -keys, 0)
    return cache


def test_a_prompt_goes_to_its_rows_and_tokens_to_their_places():
    cache = filled_cache()
    cache.begin_decode(torch.tensor([2, 0, 5]), 0, 5)
    keys, values = cache.update(torch.tensor([7.0, 8.0, 9.0]).view(3, 1, 1, 1), torch.ones(3, 1, 1, 1), 0)
    assert keys[:, 0, :6, 0].tolist() == [[3, 4, 7, 0, 0, 0], [8, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 9]]
    assert values[:, 0, :6, 0].tolist() == [[-3, -4, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [-1, -2, 0, 0, 0, 1]]
    assert keys.shape[2] == 8


def test_a_layer_without_memory_to_grow_leaves_the_cache_usable(monkeypatch):
    cache = filled_cache()
    cache.update(torch.ones(2, 1, 2, 1), torch.ones(2, 1, 2, 1), 1)
    grow, calls = LayerStorage.resized, []

    def run_out(layer, *size):
        calls.append(size)
        if len(calls) == 2:
            raise MemoryError
        return grow(layer, *size)

    monkeypatch.setattr(LayerStorage, "resized", run_out)
    for attempt in range(2):
        with pytest.raises(MemoryError) if attempt == 0 else nullcontext():
            cache.reserve(rows=4, positions=20, most_rows=8, most_positions=100)
    assert [tuple(layer.keys.shape) for layer in cache.storage] == [(4, 1, cache.capacity, 1)] * 2
    assert cache.layer(0).keys[2, 0, :2, 0].tolist() == [1, 2]


@pytest.mark.parametrize("rows", [[1, 2, 3], [1, 3, 2]])
def test_prompts_go_to_the_same_places_in_rows_side_by_side_and_in_others(rows):
    cache = RowCache()
    cache.reserve(rows=4, positions=2, most_rows=4, most_positions=2)
    keys = torch.arange(16.0).view(2, 2, 2, 2)  # [prompts, kv_heads, t, dim]
    cache.begin_prefill(torch.tensor(rows), torch.tensor([1, 0, 1]))
    cache.store_prompts(keys, -keys, 0)
    layer = cache.layer(0)
    for row, prompt in zip(rows, [1, 0, 1], strict=True):
        assert layer.keys[row, :, :2].tolist() == keys[prompt].tolist()
        assert layer.values[row, :, :2].tolist() == (-keys[prompt]).tolist()
    assert not layer.keys[0].any()
    assert not layer.keys[:, :, 2:].any()


def test_tokens_are_stored_where_torch_refuses_what_gives_other_bits():
    cache = filled_cache()
    cache.begin_decode(torch.tensor([2, 0, 5]), 0, 5)
    torch.use_deterministic_algorithms(True)
    try:
        keys, _ = cache.update(torch.tensor([7.0, 8.0, 9.0]).view(3, 1, 1, 1), torch.ones(3, 1, 1, 1), 0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert keys[:, 0, :6, 0].tolist() == [[3, 4, 7, 0, 0, 0], [8, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 9]]


def test_rows_at_one_position_store_and_read_like_others():
    cache = filled_cache()
    tokens = torch.tensor([7.0, 8.0, 9.0]).view(3, 1, 1)
    for place in (2, 3, 8):  # the last reads more places
        cache.begin_decode(torch.tensor([place] * 3), place, place)
        cache.append(tokens + place, -tokens, 0)
        keys, values = cache.read(0)
        assert keys[:, 0, place].tolist() == [7.0 + place, 8.0 + place, 9.0 + place]
        assert values[:, place, 0].tolist() == [-7, -8, -9]
    assert tuple(keys.shape) == (3, 1, 16)
    assert keys[:, 0, :5].tolist() == [[3, 4, 9, 10, 0], [0, 0, 10, 11, 0], [1, 2, 11, 12, 0]]
    cache.reserve(rows=3, positions=17, most_rows=8, most_positions=100)
    cache.begin_decode(torch.tensor([9] * 3), 9, 9)
    cache.append(tokens, tokens, 0)
    assert cache.layer(0).keys[:, 0, 9, 0].tolist() == [7, 8, 9]  # not in the storage outgrown


def test_parts_are_read_each_to_its_own_position():
    cache = filled_cache()
    tokens, parts = torch.tensor([7.0, 8.0, 9.0]).view(3, 1, 1), [RowPart(0, 2, 2), RowPart(2, 3, 12)]
    cache.begin_decode(torch.tensor([2, 0, 12]), 0, 12, parts)
    cache.append(tokens, -tokens, 0)
    (short, _), (long, values) = cache.read(0, 0), cache.read(0, 1)
    assert short.tolist() == [[[3, 4, 7, 0, 0, 0, 0, 0]], [[8, 0, 0, 0, 0, 0, 0, 0]]]
    assert long.tolist() == [[[1, 2, *[0] * 10, 9, 0, 0, 0]]]
    assert values[0, 12].tolist() == [-9]
    cache.begin_decode(torch.tensor([3, 1, 13]), 1, 13, [*parts[:1], RowPart(2, 3, 13)])
    assert cache.read(0, 0)[0].data_ptr() == short.data_ptr()
    cache.move_rows(torch.tensor([2, 0]), torch.tensor([0, 2]), 3)  # two rows change places
    assert cache.layer(0).keys[:, 0, :3, 0].tolist() == [[1, 2, 0], [8, 0, 0], [3, 4, 7]]


@pytest.mark.parametrize(("window", "seen"), [(None, [[0], [0, 1, 2, 3, 4]]), (3, [[0], [2, 3, 4]])])
def test_the_mask_shows_each_row_what_its_position_and_window_allow(window, seen):
    cache, kv_heads = RowCache(), 2
    cache.reserve(2, 16, 2, 16)
    cache.begin_decode(torch.tensor([0, 4]), 0, 4)
    mask = cache.decode_phase.mask(window, kv_heads, torch.float32)
    assert tuple(mask.shape) == (2 * kv_heads, 1, 8)
    assert set(mask.unique().tolist()) == {0.0, float("-inf")}
    assert [row.nonzero().flatten().tolist() for row in mask[:, 0] == 0] == [seen[0], seen[0], seen[1], seen[1]]
    cache.begin_decode(torch.tensor([4, 4]), 4, 4)
    shared = cache.decode_phase.mask(window, kv_heads, torch.float32)
    assert tuple(shared.shape) == (1, 1, 8)
    assert (shared[0, 0] == 0).nonzero().flatten().tolist() == seen[1]


@pytest.mark.parametrize("window", [None, 3])
def test_what_a_part_does_not_read_is_hidden_from_its_rows(window):
    cache = RowCache()
    cache.reserve(3, 48, 3, 48)
    cache.begin_decode(torch.tensor([20, 2, 3]), 2, 20, [RowPart(0, 1, 20), RowPart(1, 3, 3)])
    assert [part.num_read for part in cache.decode_phase.parts] == [24, 8]  # 21 and 4 positions, rounded up
    whole = cache.decode_phase.mask(window, 1, torch.float32)
    assert tuple(whole.shape) == (3, 1, 24)
    assert (whole[1:, :, 8:] == float("-inf")).all()


@pytest.mark.parametrize(("places", "capacity"), [(1, 16), (16, 16), (17, 48), (48, 48), (49, 80)])
def test_capacity_is_an_odd_number_of_cache_lines(places, capacity):
    cache = RowCache()
    cache.reserve(rows=1, positions=places, most_rows=1, most_positions=100)
    assert cache.capacity == capacity


def test_growth_keeps_what_is_stored_and_stays_within_the_bounds():
    cache = filled_cache()
    cache.reserve(rows=4, positions=33, most_rows=4, most_positions=40)
    assert (cache.num_rows, cache.capacity) == (4, 48)
    layer = cache.layer(0)
    assert tuple(layer.keys.shape) == (4, 1, 48, 1)
    assert layer.keys[2, 0, :3, 0].tolist() == [1, 2, 0]
    cache.reserve(rows=1, positions=1, most_rows=4, most_positions=40)
    assert (cache.num_rows, cache.capacity) == (4, 48)


def test_rows_move_and_are_read_and_written_whole():
    cache = filled_cache()
    cache.move_rows(torch.tensor([2]), torch.tensor([1]), length=2)
    assert cache.layer(0).keys[1, 0, :2, 0].tolist() == [1, 2]
    copy = cache.read_row(0, length=2)
    cache.write_rows(slice(1, 3), copy, length=2)
    assert cache.layer(0).values[:, 0, :2, 0].tolist() == [[-3, -4]] * 3


def test_free_returns_the_bytes_even_if_a_view_is_held():
    cache = filled_cache()
    held = cache.layer(0).keys[:1]
    assert cache.free() == 2 * 3 * 16 * 4  # keys and values, rows, places, bytes
    assert held.untyped_storage().nbytes() == 0
    assert cache.free() == 0


def test_decoding_before_a_prefill_is_a_bug():
    cache = RowCache()
    cache.storage.append(None)
    with pytest.raises(AssertionError, match="layer 0 decodes before its first prefill"):
        cache.layer(0)


def test_a_cache_that_grows_holds_only_one_layer_twice(monkeypatch):
    cache = RowCache()
    cache.reserve(rows=1, positions=2, most_rows=4, most_positions=100)
    cache.begin_prefill(torch.tensor([0]), torch.tensor([0]))
    for index in range(3):
        cache.store_prompts(torch.full((1, 1, 2, 1), 1.0 + index), torch.ones(1, 1, 2, 1), index)
    old = [weakref.ref(layer.values) for layer in cache.storage]
    held, resized = [], LayerStorage.resized

    def counted(layer, rows, capacity):
        held.append(sum(ref() is not None for ref in old))
        return resized(layer, rows, capacity)

    monkeypatch.setattr(LayerStorage, "resized", counted)
    cache.reserve(rows=2, positions=60, most_rows=4, most_positions=100)
    assert held == [3, 2, 1]
    assert [layer.keys[0, 0, :2, 0].tolist() for layer in cache.storage] == [[1, 1], [2, 2], [3, 3]]
