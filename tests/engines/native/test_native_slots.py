import numpy as np

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.slots import Request, Slots
from lightrl.seeding import mix_seed, prefix_state, uniform_array

EOS = 3


def slots_of(*limits, num_slots=8, **options):
    table = np.zeros(10, np.bool_)
    table[EOS] = True
    slots = Slots(num_slots, table)
    for index, limit in enumerate(limits):
        slots.admit(Request(index, (1, 2), SamplingParams(max_new_tokens=limit, seed=index, **options)), 0, 1)
    return slots


def record(slots, tokens, version=0):
    slots.record(slice(0, slots.num_active), np.array(tokens), -np.array(tokens, float), version)
    return slots.finish(slice(0, slots.num_active))


def test_the_last_rows_fill_the_holes_and_keep_their_outputs():
    slots = slots_of(5, 1, 5, 1, 5)
    done, moves = record(slots, [5, 6, 7, 8, 9], version=4)
    assert [(item.request_id, item.output_token_ids, item.logprobs) for item in done] == [
        (1, (6,), (-6.0,)),
        (3, (8,), (-8.0,)),
    ]
    assert (moves.sources.tolist(), moves.targets.tolist()) == ([4], [1])
    assert slots.tokens[:3].tolist() == [5, 9, 7]
    done, moves = record(slots, [EOS, EOS, EOS], version=5)
    assert moves is None
    assert [(item.request_id, item.output_token_ids, item.versions) for item in done] == [
        (0, (5, EOS), (4, 5)),
        (4, (9, EOS), (4, 5)),
        (2, (7, EOS), (4, 5)),
    ]
    assert {item.finish_reason for item in done} == {"stop"}
    assert slots.num_active == 0


def test_an_end_token_at_the_limit_counts_as_stop():
    done, _ = record(slots_of(1), [EOS])
    assert done[0].finish_reason == "stop"


def test_ignored_end_tokens_and_extra_stop_tokens():
    done, _ = record(slots_of(9, 9, ignore_eos=True, stop_token_ids=(7,)), [EOS, 7])
    assert [(item.request_id, item.finish_reason) for item in done] == [(1, "stop")]


def test_outputs_grow_past_their_first_columns():
    slots = slots_of(40)
    for token in range(39):
        assert record(slots, [4 + token % 5]) == ([], None)
    (item,), _ = record(slots, [5])
    assert item.output_token_ids == (*(4 + token % 5 for token in range(39)), 5)
    assert item.finish_reason == "length"


def test_positions_and_places_follow_the_tokens():
    slots = slots_of(4, 6)
    assert slots.most_places() == 8
    record(slots, [5, 5])
    assert slots.positions[:2].tolist() == [2, 2]  # the first new token stands after the two of the prompt
    assert slots.most_places() == 8


def test_the_draws_are_those_of_seeding_uniform():
    rng = np.random.default_rng(0)
    parts = [(int(seed), int(sample), int(token)) for seed, sample, token in rng.integers(0, 2**40, (200, 3))]
    parts += [(0, 0, 0), (2**63 - 1, 1, 2), (-1, 5, 7)]
    states = np.array([prefix_state(seed, sample) for seed, sample, _ in parts], np.uint64)
    drawn = uniform_array(states, np.array([token for *_, token in parts]))
    assert drawn.tolist() == [(mix_seed(*part) >> 10) / 2**53 for part in parts]
