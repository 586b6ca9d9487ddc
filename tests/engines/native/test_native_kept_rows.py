"""Samples that were stopped and go on with the keys and values that they had."""

import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_native_engine import FAMILIES, random_requests
from tiny_hybrids import tiny_model as tiny_hybrid

from lightrl.engines.base import EnginePrompt, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native.engine import NativeEngine, empty_copy
from lightrl.engines.native.kept_rows import KeepingEngine, KeptRow, ReturningScheduler
from lightrl.engines.native.scheduler import Request
from lightrl.testing import EngineContract

CPU = torch.device("cpu")


class TestKeepingEngine(EngineContract):
    engine = "lightrl.engines.native.kept_rows:build_keeping_engine"


@pytest.fixture
def make_engine(tiny_model):
    def make(family="qwen3", seed=0, kind=KeepingEngine, **options):
        engine = kind(tiny_model(family, seed), **{"eos_token_ids": (2,), "device": CPU, **options})
        made = ColocatedEngine(engine)
        made.version = 0
        return made

    return make


def in_phases(engine, prompts, params, num_steps, between=lambda engine: None):
    """Stops everything after every few steps and lets it go on; returns completions by (prompt, sample)."""
    waiting = [(index, prompt, param, None) for index, (prompt, param) in enumerate(zip(prompts, params, strict=True))]
    done = {}
    while waiting:
        owners = {engine.submit(prompt, param, part): (i, prompt, param) for i, prompt, param, part in waiting}
        for _ in range(num_steps):
            for item in engine.step():
                done[owners[item.request_id][0], item.sample_index] = item
        stopped, waiting = engine.abort(), []
        for item in stopped:
            index, prompt, param = owners[item.request_id]
            if item.output_token_ids:
                waiting.append((index, prompt, param, item))
            else:  # it had no row yet
                one = {"n": 1, "first_sample": item.sample_index}
                waiting.append((index, prompt, SamplingParams(**{**_fields(param), **one}), None))
        random.Random(len(waiting)).shuffle(waiting)
        between(engine)
    return done


def _fields(params):
    return {name: getattr(params, name) for name in type(params).__dataclass_fields__}


def weights_of(model):
    return [(name, item.detach()) for name, item in model.named_parameters()]


def num_computed(engine):
    return engine.engine.num_prefill_tokens


def expect_equal(got, expected):
    assert got.keys() == expected.keys()
    for key, item in expected.items():
        assert got[key].output_token_ids == item.output_token_ids
        assert got[key].finish_reason == item.finish_reason
        torch.testing.assert_close(torch.tensor(got[key].logprobs), torch.tensor(item.logprobs), atol=1e-5, rtol=0)


def test_requests_that_come_back_enter_first_and_the_others_keep_their_order():
    scheduler = ReturningScheduler(2, np.zeros(9, np.bool_))
    for number in range(5):
        scheduler.submit(Request(number, (1, 2), SamplingParams(max_new_tokens=5)))
    assert [item.request.request_id for item in scheduler.admit_first({1, 3, 4})] == [1, 3]
    scheduler.abort({1, 3})
    assert [item.request.request_id for item in scheduler.admit()] == [4, 0]
    scheduler.abort({4, 0})
    assert [item.request.request_id for item in scheduler.admit()] == [2]


# ---- The same weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_what_goes_on_equals_what_was_not_stopped_and_computes_no_token_twice(family, make_engine):
    prompts, params = random_requests(9)
    engine, plain = make_engine(family, max_num_seqs=7), make_engine(family, kind=NativeEngine, max_num_seqs=7)
    expected = {(item.request_id, item.sample_index): item for item in plain.generate(prompts, params)}
    expect_equal(in_phases(engine, prompts, params, 5), expected)
    prefilled_again = in_phases(plain, prompts, params, 5)
    expect_equal(prefilled_again, expected)
    # A prompt is computed again for those of its samples that had no row when everything was stopped.
    assert num_computed(engine) <= sum(len(prompt) * param.n for prompt, param in zip(prompts, params, strict=True))


def test_a_group_that_has_entered_is_never_computed_again(make_engine):
    engine = make_engine(max_num_seqs=16)
    prompts = [[5, 9, 33, 7], [7, 8], [11]]
    params = [SamplingParams(n=4, max_new_tokens=40, seed=seed, ignore_eos=True) for seed in range(3)]
    done = in_phases(engine, prompts, params, 6, between=lambda engine: engine.sleep(1) and engine.wake())
    assert [len(item.output_token_ids) for item in done.values()] == [40] * 12
    assert num_computed(engine) == 4 + 2 + 1


def test_a_row_comes_back_beside_one_that_goes_on(make_engine):
    """Each is drawn at its own temperature."""
    engine, plain = make_engine(max_num_seqs=4), make_engine(kind=NativeEngine, max_num_seqs=4)
    prompts = [[5, 9, 33], [7, 8]]
    params = [
        SamplingParams(max_new_tokens=24, seed=seed, temperature=temperature, ignore_eos=True)
        for seed, temperature in ((1, 0.3), (2, 3.0))
    ]
    expected = plain.generate(prompts, params)
    first, second = (engine.submit(*pair) for pair in zip(prompts, params, strict=True))
    for _ in range(5):
        engine.step()
    [stopped] = engine.abort([first])
    for _ in range(3):
        engine.step()
    again = engine.submit(prompts[0], params[0], stopped)
    done = {}
    while engine.has_unfinished():
        done |= {item.request_id: item for item in engine.step()}
    expect_equal({0: done[again], 1: done[second]}, dict(enumerate(expected)))


def test_rows_come_back_to_an_engine_whose_cache_was_freed_and_beside_new_prompts(make_engine, tiny_model):
    engine, plain = make_engine(max_num_seqs=4), make_engine(kind=NativeEngine, max_num_seqs=4)
    old, new = SamplingParams(n=3, max_new_tokens=20, seed=1), SamplingParams(n=2, max_new_tokens=9, seed=2)
    expected = plain.generate([[5, 9, 33], [7, 8]], [old, new])
    engine.submit([5, 9, 33], old)
    for _ in range(4):
        engine.step()
    stopped = engine.abort()
    assert engine.sleep(2) > 0
    engine.update_weights(weights_of(tiny_model("qwen3")), 0)
    engine.wake()
    ids = [engine.submit([7, 8], new), *(engine.submit([5, 9, 33], old, item) for item in stopped)]
    done = {}
    while engine.has_unfinished():
        done |= {(ids.index(item.request_id) > 0, item.sample_index): item for item in engine.step()}
    assert len(done) == 5
    expect_equal(done, {(item.request_id == 0, item.sample_index): item for item in expected})


@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
def test_models_with_a_state_of_their_own_go_on_by_it(family):
    source = tiny_hybrid(family)
    params = [SamplingParams(n=2, max_new_tokens=9, seed=3, ignore_eos=True)] * 2
    engines = []
    for kind in (KeepingEngine, NativeEngine):
        engine = ColocatedEngine(kind(empty_copy(source, torch.float32, CPU), eos_token_ids=(2,), device=CPU))
        engine.update_weights(list(source.named_parameters()), 0)
        engines.append(engine)
    expected = engines[1].generate([[5], [7, 8, 9]], params)
    done = in_phases(engines[0], [[5], [7, 8, 9]], params, 2, between=lambda engine: engine.sleep(1) and engine.wake())
    expect_equal(done, {(item.request_id, item.sample_index): item for item in expected})
    assert num_computed(engines[0]) == 4


# ---- Other weights -------------------------------------------------------------------------------------------------


def test_new_weights_read_the_keys_and_values_of_the_old(make_engine, tiny_model):
    """The same as weights that change under running samples, which no stop interrupts."""
    params = SamplingParams(n=4, max_new_tokens=24, seed=5, ignore_eos=True)
    other = weights_of(tiny_model("qwen3", 1))
    stopped, running = make_engine(), make_engine(kind=NativeEngine)
    for engine in (stopped, running):
        engine.submit([5, 9, 33], params)
        for _ in range(8):
            engine.step()
    partials = stopped.abort()
    stopped.sleep(1)
    stopped.update_weights(other, 1)
    stopped.wake()
    for item in partials:
        stopped.submit([5, 9, 33], params, item)
    running.update_weights(other, 1, recompute_kv=False)
    results = []
    for engine in (stopped, running):
        done = {}
        while engine.has_unfinished():
            done |= {item.sample_index: item for item in engine.step()}
        results.append(done)
    expect_equal(*results)
    assert {item.versions for item in results[0].values()} == {(0,) * 9 + (1,) * 15}


# ---- Memory --------------------------------------------------------------------------------------------------------


def test_no_row_outlives_the_completion_that_it_came_with(make_engine):
    engine = make_engine(max_num_seqs=5)
    params = SamplingParams(n=4, max_new_tokens=40, seed=1, ignore_eos=True)
    first, second = engine.submit([5, 9, 33], params), engine.submit([7, 8], params)
    engine.step()
    engine.step()
    given_up = engine.abort([first])  # as an episode's time-out does
    rows = [weakref.ref(item.kept) for item in given_up]
    assert all(item.kept.num_bytes > 0 for item in given_up)
    engine.step()
    stopped = engine.abort([second])
    assert not engine.has_unfinished()
    rows += [weakref.ref(item.kept) for item in stopped]
    assert len(rows) == 8
    engine.submit([7, 8], params, stopped[0])  # one goes on, and is stopped before it had a row
    (waiting,) = engine.abort()
    assert waiting.kept is stopped[0].kept
    assert waiting.output_token_ids == stopped[0].output_token_ids
    engine.submit([7, 8], params, waiting)
    engine.step()
    assert waiting.kept.is_empty  # its content has moved into the cache
    assert waiting.kept.num_bytes == 0
    assert engine.engine._returning == {}
    del given_up, stopped, waiting
    engine.abort()
    gc.collect()
    assert [row() for row in rows] == [None] * 8


def test_a_row_that_was_let_go_of_is_computed_from_the_prompt(make_engine):
    engine = make_engine()
    params = SamplingParams(max_new_tokens=12, seed=1, ignore_eos=True)
    (expected,) = engine.generate([[5, 9, 33]], [params])
    before = num_computed(engine)
    engine.submit([5, 9, 33], params)
    for _ in range(4):
        engine.step()
    (partial,) = engine.abort()
    partial.kept.take()
    engine.submit([5, 9, 33], params, partial)
    (done,) = [item for _ in range(12) for item in engine.step()]
    expect_equal({0: done}, {0: expected})
    assert num_computed(engine) == before + 3 + 3 + len(partial.output_token_ids)


def test_a_row_of_other_tokens_is_a_bug(make_engine):
    with pytest.raises(AssertionError, match="of other tokens"):
        make_engine().submit(EnginePrompt(token_ids=(5, 9), kept=KeptRow([], 7)), SamplingParams())


def test_a_model_that_takes_images_is_refused(tiny_model):
    media = SimpleNamespace(image_token_id=3, video_token_id=4)
    with pytest.raises(ValueError, match="--rollout.keep_cache does not go with a model that takes images"):
        KeepingEngine(tiny_model("qwen3"), eos_token_ids=(2,), device=CPU, media=media)


@pytest.mark.parametrize("part", ["_reserve", "_put_back"])
def test_a_failure_while_a_sample_comes_back_changes_nothing_of_it(part, make_engine, monkeypatch):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=3)
    (expected,) = make_engine().generate([[5, 6, 7]], [params])
    engine = make_engine()
    engine.submit([5, 6, 7], params)
    for _ in range(4):
        engine.step()
    (stopped,) = engine.abort()
    engine.sleep()  # frees the cache, so that stale keys and values cannot help
    engine.wake()
    engine.submit([5, 6, 7], params, stopped)

    def run_out(*args):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine.engine, part, run_out)
        with pytest.raises(MemoryError):
            engine.step()
    found = []
    while engine.has_unfinished():
        found += engine.step()
    assert [item.output_token_ids for item in found] == [expected.output_token_ids]
