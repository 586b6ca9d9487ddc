"""The scheduler by itself: integers in, integers out, no model."""

import numpy as np

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.scheduler import Request, Scheduler, prefill_groups
from lightrl.seeding import mix_seed, prefix_state, uniform_array

EOS = 3


def make(num_rows=8):
    table = np.zeros(10, np.bool_)
    table[EOS] = True
    return Scheduler(num_rows, table)


def request(request_id, limit=5, prompt=(1, 2), **options):
    return Request(request_id, tuple(prompt), SamplingParams(max_new_tokens=limit, seed=request_id, **options))


def running(*limits, num_rows=8, **options):
    scheduler = make(num_rows)
    for index, limit in enumerate(limits):
        scheduler.submit(request(index, limit, **options))
    scheduler.admit()
    return scheduler


def record(scheduler, tokens, version=0, first_row=0):
    return scheduler.record(first_row, np.array(tokens), -np.array(tokens, float), version)


def admitted(scheduler):
    return [(item.request.request_id, item.first_row, item.count) for item in scheduler.admit()]


# ---- Running samples


def test_padding_is_found():
    scheduler = running(9, 9, 9, 9)
    scheduler.rows.position[:4] = [100, 10, 10, 10]
    assert scheduler.is_padded(270)  # 400 are read, and 130 of them are real
    assert not scheduler.is_padded(271)
    scheduler.rows.position[:4] = [100, 60, 60, 60]
    assert not scheduler.is_padded(1)  # 400 are less than 1.5 times 280


def test_what_is_withdrawn_waits_in_its_order_unless_it_has_begun():
    scheduler = make()
    for index in range(3):
        scheduler.submit(request(index, n=2))
    scheduler.withdraw(scheduler.admit())
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    admissions = scheduler.admit()
    assert [(item.request.request_id, item.first_row, item.count) for item in admissions] == [
        *((index, 2 * index, 2) for index in range(3))
    ]
    record(scheduler, [4] * 6)
    scheduler.withdraw(admissions)
    assert (scheduler.num_running, scheduler.num_waiting) == (6, 0)


def test_of_several_tokens_only_those_that_count_end_a_sample():
    scheduler = running(9, 9, stop_token_ids=(6,))
    tokens = np.array([[4, EOS, 6], [4, 6, EOS]])
    [ended], _ = scheduler.record_runs(tokens, -tokens.astype(float), np.array([1, 3]), 7)
    assert (ended.request_id, ended.output_token_ids, ended.finish_reason) == (1, (4, 6), "stop")
    assert (ended.logprobs, ended.versions) == ((-4.0, -6.0), (7, 7))
    [going_on], _ = scheduler.abort(None)
    assert (going_on.request_id, going_on.output_token_ids) == (0, (4,))


def test_rows_change_places_with_all_that_they_have():
    scheduler = running(5, 5, 5, 5)
    record(scheduler, [4, 5, 6, 7])
    moves = scheduler.reorder(np.array([2, 1, 3, 0]))
    assert (moves.sources.tolist(), moves.targets.tolist()) == ([2, 3, 0], [0, 2, 3])
    done, _ = scheduler.abort({0, 3})
    assert [(item.request_id, item.output_token_ids) for item in done] == [(0, (4,)), (3, (7,))]
    assert [item.request_id for item in scheduler.rows.request[:2]] == [2, 1]


def test_the_last_rows_fill_the_holes_and_keep_their_outputs():
    scheduler = running(5, 1, 5, 1, 5)
    done, moves = record(scheduler, [5, 6, 7, 8, 9], version=4)
    assert [(item.request_id, item.output_token_ids, item.logprobs) for item in done] == [
        (1, (6,), (-6.0,)),
        (3, (8,), (-8.0,)),
    ]
    assert (moves.sources.tolist(), moves.targets.tolist()) == ([4], [1])
    assert scheduler.rows.token[:3].tolist() == [5, 9, 7]
    done, moves = record(scheduler, [EOS, EOS, EOS], version=5)
    assert moves is None
    assert [(item.request_id, item.output_token_ids, item.versions) for item in done] == [
        (0, (5, EOS), (4, 5)),
        (4, (9, EOS), (4, 5)),
        (2, (7, EOS), (4, 5)),
    ]
    assert {item.finish_reason for item in done} == {"stop"}
    assert scheduler.num_running == 0


def test_an_end_token_at_the_limit_counts_as_stop():
    done, _ = record(running(1), [EOS])
    assert done[0].finish_reason == "stop"


def test_ignored_end_tokens_and_extra_stop_tokens():
    done, _ = record(running(9, 9, ignore_eos=True, stop_token_ids=(7,)), [EOS, 7])
    assert [(item.request_id, item.finish_reason) for item in done] == [(1, "stop")]


def test_outputs_grow_past_their_first_columns():
    scheduler = running(40)
    for token in range(39):
        assert record(scheduler, [4 + token % 5]) == ([], None)
    (item,), _ = record(scheduler, [5])
    assert item.output_token_ids == (*(4 + token % 5 for token in range(39)), 5)
    assert item.finish_reason == "length"


def test_positions_follow_the_tokens():
    scheduler = running(4, 6)
    assert scheduler.most_positions() == 8
    record(scheduler, [5, 5])
    assert scheduler.rows.position[:2].tolist() == [2, 2]  # the first new token stands after the two of the prompt
    assert scheduler.most_positions() == 8


# ---- The queue


def test_a_request_enters_in_parts_as_rows_come_free():
    scheduler = make(num_rows=3)
    scheduler.submit(request(0, limit=1, n=2))
    scheduler.submit(request(1, limit=2, n=4, first_sample=5))
    assert admitted(scheduler) == [(0, 0, 2), (1, 2, 1)]
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 1)
    assert admitted(scheduler) == []  # no row is free
    done, moves = record(scheduler, [5, 6, 7])  # request 0 is done; the sample of request 1 moves to row 0
    assert [(item.request_id, item.sample_index) for item in done] == [(0, 0), (0, 1)]
    assert (moves.sources.tolist(), moves.targets.tolist()) == ([2], [0])
    assert admitted(scheduler) == [(1, 1, 2)]
    assert scheduler.rows.sample[:3].tolist() == [5, 6, 7]
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 1)
    done, moves = record(scheduler, [5, 6], first_row=1)  # the first tokens of those that entered
    assert (done, moves) == ([], None)
    done, _ = record(scheduler, [8, 8, 8])
    assert [(item.sample_index, item.output_token_ids) for item in done] == [(5, (7, 8)), (6, (5, 8)), (7, (6, 8))]
    assert admitted(scheduler) == [(1, 0, 1)]
    assert scheduler.num_waiting == 0


def test_the_queue_is_served_in_order():
    scheduler = make(num_rows=2)
    for index in range(4):
        scheduler.submit(request(index, limit=1))
    assert admitted(scheduler) == [(0, 0, 1), (1, 1, 1)]
    record(scheduler, [5, 5])
    assert admitted(scheduler) == [(2, 0, 1), (3, 1, 1)]


def test_draws_depend_on_seed_sample_and_token_alone():
    scheduler = make()
    scheduler.submit(request(0))
    scheduler.submit(request(4, n=2, first_sample=1, first_token=7))
    scheduler.admit()
    rows = scheduler.rows
    assert rows.seed_state[:3].tolist() == [prefix_state(0, 0), prefix_state(4, 1), prefix_state(4, 2)]
    record(scheduler, [5, 5, 5])
    assert (rows.first_draw + rows.num_produced)[:3].tolist() == [1, 8, 8]


def test_abort_takes_running_and_waiting_samples_of_the_chosen_requests():
    scheduler = make(num_rows=4)
    for index in range(3):
        scheduler.submit(request(index, n=2))
    assert admitted(scheduler) == [(0, 0, 2), (1, 2, 2)]
    record(scheduler, [5, 6, 7, 8], version=4)
    done, moves = scheduler.abort({0, 2})
    assert [(item.request_id, item.sample_index, item.output_token_ids, item.versions) for item in done] == [
        (0, 0, (5,), (4,)),
        (0, 1, (6,), (4,)),
        (2, 0, (), ()),
        (2, 1, (), ()),
    ]
    assert {item.finish_reason for item in done} == {"abort"}
    assert (moves.sources.tolist(), moves.targets.tolist()) == ([2, 3], [0, 1])
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 0)
    assert scheduler.abort({0}) == ([], None)
    done, moves = scheduler.abort(None)
    assert [item.output_token_ids for item in done] == [(7,), (8,)]
    assert moves is None
    assert scheduler.abort(None) == ([], None)


def test_an_abort_between_two_parts_of_a_request_returns_both():
    scheduler = make(num_rows=1)
    scheduler.submit(request(0, n=3, first_sample=2))
    scheduler.admit()
    record(scheduler, [5])
    done, _ = scheduler.abort(None)
    assert [(item.sample_index, item.output_token_ids) for item in done] == [(2, (5,)), (3, ()), (4, ())]


def test_prompts_of_similar_length_run_together():
    assert prefill_groups([]) == []
    assert prefill_groups([3, 3, 3]) == prefill_groups([3, 1, 2]) == [[0, 1, 2]]
    # 8 short prompts fill 8 * 100 of 800 places; with one of 2,000 padding would be most of 18,000
    assert prefill_groups([100] * 4 + [2000] + [100] * 4) == [[0, 1, 2, 3, 5, 6, 7, 8], [4]]
    # at most 16,384 tokens at a time: 8 * 2,000 fit, 9 * 2,000 do not
    assert [len(group) for group in prefill_groups([2000] * 20)] == [8, 8, 4]
    assert prefill_groups([20_000]) == [[0]]


def test_the_draws_are_those_of_seeding_uniform():
    rng = np.random.default_rng(0)
    parts = [(int(seed), int(sample), int(token)) for seed, sample, token in rng.integers(0, 2**40, (200, 3))]
    parts += [(0, 0, 0), (2**63 - 1, 1, 2), (-1, 5, 7)]
    states = np.array([prefix_state(seed, sample) for seed, sample, _ in parts], np.uint64)
    drawn = uniform_array(states, np.array([token for *_, token in parts]))
    assert drawn.tolist() == [(mix_seed(*part) >> 10) / 2**53 for part in parts]
