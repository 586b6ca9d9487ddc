"""One engine of a tied model: numbers, requests, weights, memory, and what it leaves in this process."""

import asyncio
import logging
import multiprocessing
import os
import random
import signal

import pytest
import torch
from sabotaged_loader import FAULT_FILE
from sglang_testing import hf_logprobs, largest_difference, pairs, started, tiny

from lightrl.engines.base import SamplingParams, WeightSyncError
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native.sampler import keep_top

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]


@pytest.fixture(scope="module")
def model():
    return tiny("tied")


def environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(scope="module")
def before():
    return {
        "environment": environment(),
        "handlers": list(logging.getLogger().handlers),
        "signals": (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "draws": (random.getstate(), torch.get_rng_state()),
    }


@pytest.fixture(scope="module")
def raw(model, before):
    with started(model, sync_bucket_mb=1) as engine:
        yield engine


@pytest.fixture
def engine(raw, model):
    """Holding the model's weights, awake, without requests."""
    colocated = ColocatedEngine(raw)
    raw.abort()
    raw.wake("weights")
    colocated.update_weights(pairs(model), 1)
    raw.wake("kv_cache")
    yield colocated
    (raw._reports / FAULT_FILE).unlink(missing_ok=True)


def params(**given):
    return SamplingParams(**{"max_new_tokens": 20, "ignore_eos": True, **given})


def generate(engine, **given):
    return engine.generate(PROMPTS, [params(**given)] * len(PROMPTS))


def finish(engine):
    done = []
    while engine.has_unfinished():
        done += engine.step()
    return done


def test_the_start_leaves_this_process_as_it_was(raw, before):
    assert environment() == before["environment"]
    assert logging.getLogger().handlers == before["handlers"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before["signals"]
    assert multiprocessing.get_start_method(allow_none=True) == before["start_method"]
    assert random.getstate() == before["draws"][0]
    assert torch.equal(torch.get_rng_state(), before["draws"][1])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_hugging_face_before_and_after_a_sync(engine, model, temperature):
    first = generate(engine, temperature=temperature, n=3)
    assert largest_difference(model, first, temperature or 1.0) < 1e-5
    newer = tiny("tied", seed=1)
    engine.update_weights(pairs(newer), 2)
    second = generate(engine, temperature=temperature, n=3)
    assert largest_difference(newer, second, temperature or 1.0) < 1e-5
    assert largest_difference(model, second, temperature or 1.0) > 0.1
    assert {version for item in second for version in item.versions} == {2}
    assert [item.sample_index for item in first] == [0, 1, 2] * 3
    assert [item.prompt_token_ids for item in first[::3]] == [tuple(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.9}])
def test_logprobs_are_of_the_distribution_that_top_k_or_top_p_leave(engine, model, cut):
    items = generate(engine, temperature=0.7, n=2, **cut)

    def kept(scores):
        return keep_top(scores, torch.tensor(cut.get("top_k", scores.shape[1])), torch.tensor(cut.get("top_p", 1.0)))

    assert largest_difference(model, items, 0.7, kept) < 1e-5
    assert largest_difference(model, items, 0.7) > 0.01


def test_every_end_token_stops_and_is_kept(engine):
    items = engine.generate([[5, 6]], [params(ignore_eos=False, max_new_tokens=200, n=24, stop_token_ids=(4,))])
    ends = [item.output_token_ids[-1] for item in items if item.finish_reason == "stop"]
    assert set(ends) <= {2, 3, 4}
    assert len(set(ends)) > 1
    for item in items:
        assert not {2, 3, 4} & set(item.output_token_ids[:-1])


def test_tokens_asked_for_stop_also_where_the_end_is_ignored(engine):
    items = engine.generate([[5, 6]], [params(max_new_tokens=200, n=8, stop_token_ids=(4, 7, 9, 11))])
    stopped = [item for item in items if item.finish_reason == "stop"]
    assert stopped
    assert all(item.output_token_ids[-1] in (4, 7, 9, 11) for item in stopped)
    assert all(len(item.logprobs) == len(item.output_token_ids) for item in items)


def test_the_whole_context_can_be_used(engine, raw):
    length = raw.max_model_len
    assert length == 256
    (item,) = engine.generate([[5] * (length - 1)], [params(max_new_tokens=1)])
    assert len(item.output_token_ids) == 1
    (item,) = engine.generate([[5]], [params(max_new_tokens=length - 1)])
    assert (len(item.output_token_ids), item.finish_reason) == (length - 1, "length")


def test_samples_of_a_prompt_differ_and_share_its_keys(engine):
    items = engine.generate([[5, 6, 7]], [params(n=8)])
    assert len({item.output_token_ids for item in items}) == 8


@pytest.mark.parametrize(
    ("prompt", "given", "text"),
    [
        ([], {}, "empty"),
        ([98], {}, "outside the model's vocabulary of 98"),
        ([-1], {}, "outside the model's vocabulary"),
        ([5] * 250, {}, "beyond the context of 256"),
        ([5], {"min_new_tokens": 2}, "needs a tokenizer of its own for min_new_tokens"),
        ([5], {"frequency_penalty": 0.2}, "its penalties count a token one step late"),
    ],
)
def test_what_would_end_the_scheduler_is_refused(engine, raw, prompt, given, text):
    with pytest.raises(ValueError, match=text):
        engine.submit(prompt, params(**given))
    assert not raw.has_unfinished()


def test_abort_gives_what_there_is_and_leaves_the_others(engine, raw):
    ids = [raw.submit([5, 6, 7], params(max_new_tokens=240, n=2)) for _ in range(12)]  # 1 and 11 share a beginning
    raw.step()
    stopped = raw.abort([ids[1]])
    assert [(item.request_id, item.sample_index) for item in stopped] == [(ids[1], 0), (ids[1], 1)]
    for item in stopped:
        assert item.finish_reason == "abort"
        assert 0 < len(item.output_token_ids) < 240
        assert len(item.output_token_ids) == len(item.logprobs) == len(item.versions)
    done = finish(raw)
    assert sorted({item.request_id for item in done}) == sorted(set(ids) - {ids[1]})
    assert all(len(item.output_token_ids) == 240 for item in done)


def test_abort_before_the_start_gives_empty_samples(engine, raw):
    raw.submit([5, 6], params(n=2))
    stopped = raw.abort()
    assert [(item.output_token_ids, item.finish_reason) for item in stopped] == [((), "abort")] * 2
    assert not raw.has_unfinished()
    assert raw.step() == []


def test_a_load_in_flight_splits_the_versions(engine, raw, model):
    newer = tiny("tied", seed=2)
    raw.submit([5, 6, 7], params(max_new_tokens=240, n=2))
    raw.step()
    raw.load_weights(pairs(newer), 9)
    done = finish(raw)
    for item in done:
        switch = item.versions.index(9)
        assert 0 < switch < 240
        assert item.versions == (1,) * switch + (9,) * (240 - switch)
    fresh = raw.generate([[5, 6, 7]], [params(n=2)])  # its prompt is cached, with keys of the older weights
    assert largest_difference(newer, fresh) < 1e-5
    raw.load_weights(pairs(model), 1)


def test_a_sync_in_flight_that_recomputes_gives_the_new_weights_logprobs(engine, model):
    newer = tiny("tied", seed=3)
    engine.submit([5, 6, 7], params(max_new_tokens=240, n=3))
    engine.step()
    engine.update_weights(pairs(newer), 2)
    done = finish(engine)
    assert sorted(item.sample_index for item in done) == [0, 1, 2]
    for item in done:
        switch = item.versions.index(2)
        assert 0 < switch < 240
        assert len(item.output_token_ids) == 240
        differences = (hf_logprobs(newer, item) - torch.tensor(item.logprobs)).abs()
        assert float(differences[switch:].max()) < 1e-5


def test_sleep_and_wake_may_be_called_twice(engine, raw, model):
    assert engine.sleep(1) == 0  # on a CPU nothing is freed, and none is claimed
    assert engine.sleep(1) == 0
    assert raw.sleep(1) == 0
    with pytest.raises(RuntimeError, match="sleep: wake"):
        raw.submit([5], params())
    for _ in range(2):
        raw.wake("weights")
        raw.wake("kv_cache")
    engine.wake()
    engine.wake()
    assert largest_difference(model, generate(engine)) < 1e-5


def test_after_a_sleep_of_level_2_the_weights_must_come_again(engine, raw, model):
    engine.sleep(2)
    with pytest.raises(RuntimeError, match="wake\\('weights'\\) first"):
        raw.load_weights(pairs(model), 3)
    raw.wake("weights")
    raw.wake("kv_cache")
    lost = raw.generate(PROMPTS, [params()] * 3)
    assert largest_difference(model, lost) > 0.1  # the weights really were gone
    raw.sleep(2)
    engine.update_weights(pairs(model), 3)  # wakes the weights only
    engine.wake()
    assert largest_difference(model, generate(engine)) < 1e-5


def test_it_may_be_called_from_a_coroutine(engine, model):
    async def rollout():
        return generate(engine)

    assert largest_difference(model, asyncio.run(rollout())) < 1e-5


def test_no_sleep_with_requests(engine, raw):
    raw.submit([5], params())
    with pytest.raises(RuntimeError, match="requests unfinished"):
        raw.sleep()
    raw.abort()


def test_sleep_right_after_the_last_request(engine, raw):
    """The scheduler clears up for a moment, in which it must not be told to sleep."""
    for count in range(1, 4):
        engine.submit([5, 6], params(n=8, max_new_tokens=200))
        for _ in range(count % 3):
            engine.step()
        engine.abort()
        engine.sleep(1)
        engine.wake()
        assert len(engine.generate([[5, 6]], [params(n=count, max_new_tokens=count)])) == count
        engine.sleep(1)
        engine.wake()


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("skip_one", "model.layers.1.self_attn.k_proj.weight is not held"),
        ("swap_two", "model.layers.0.input_layernorm.weight is not held"),
        ("swap_gate_and_up", "model.layers.1.mlp.gate_proj.weight is not held"),
        ("scale_one", "model.layers.0.mlp.down_proj.weight is not held"),
        ("keep_old", "model.embed_tokens.weight is not held"),
        ("break_down", "RuntimeError out of order"),
    ],
)
def test_a_weight_that_did_not_land_is_named(engine, raw, model, fault, named):
    newer = tiny("tied", seed=4)
    (raw._reports / FAULT_FILE).write_text(fault)
    with pytest.raises(WeightSyncError, match=named) as caught:
        engine.update_weights(pairs(newer), 2)
    if fault in ("skip_one", "scale_one"):
        assert str(caught.value).count(" is not held") == 1
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate([[5]], [params()])
    (raw._reports / FAULT_FILE).unlink()
    engine.update_weights(pairs(newer), 2)  # it has gone on living
    assert largest_difference(newer, generate(engine)) < 1e-5


def test_missing_unknown_and_misshapen_weights_are_named_and_all_are_consumed(engine, raw, model):
    given = [*pairs(model)[:-1], ("model.extra.weight", torch.zeros(2))]
    given[1] = (given[1][0], given[1][1][:1])
    left = iter(given)
    with pytest.raises(WeightSyncError) as caught:
        raw.load_weights(left, 2)
    assert next(left, None) is None
    for text in (f"missing {pairs(model)[-1][0]}", "unknown model.extra.weight", f"misshapen {given[1][0]}"):
        assert text in str(caught.value)


def test_buckets_are_bounded_and_their_size_changes_nothing(engine, raw, model, monkeypatch):
    sizes = []
    real = raw._owned.manager.update_weights_from_tensor

    def watched(request, given):
        sizes.append((request.weight_version, request.flush_cache))
        return real(request, given)

    monkeypatch.setattr(raw._owned.manager, "update_weights_from_tensor", watched)
    monkeypatch.setattr(raw._options, "sync_bucket_mb", 2**-10)  # 1 KiB: nearly every tensor by itself
    newer = tiny("tied", seed=6)
    raw.load_weights(pairs(newer), 2)
    assert len(sizes) > 10
    assert sizes[-1] == ("2", True)
    assert set(sizes[:-1]) == {(None, False)}
    assert largest_difference(newer, raw.generate(PROMPTS, [params()] * 3)) < 1e-5


def test_a_signal_of_a_dying_scheduler_does_not_kill_this_process(engine, raw, model):
    os.kill(os.getpid(), signal.SIGQUIT)
    manager = raw._process.manager
    manager.signal_handler_class(manager).running_phase_sigquit_handler()  # what would have been called
    assert largest_difference(model, generate(engine)) < 1e-5


def test_y_an_answer_that_cannot_be_read_is_an_error_and_kills_nobody(engine, raw, monkeypatch):
    def fail(answer):
        raise KeyError("an answer of another version")

    monkeypatch.setattr(raw._process.manager, "_handle_batch_output", fail)
    raw.submit([5], params())
    with pytest.raises(RuntimeError, match="could not read an answer.*KeyError.*another version"):
        finish(raw)
    with pytest.raises(RuntimeError, match="made anew"):
        raw.step()


def test_z_dead_schedulers_are_an_error_and_close_ends_only_its_own(raw):
    raw._process._failure = None  # of the test before
    child = multiprocessing.get_context("spawn").Process(target=_wait, daemon=True)
    child.start()
    raw.submit([5], params())
    raw._process._processes[0].kill()
    with pytest.raises(RuntimeError, match="SGLang's processes have ended"):
        finish(raw)
    contexts = [raw._process.manager.send_to_scheduler.context, raw._process.engine.send_to_rpc.context]
    raw.close()
    raw.close()
    assert all(context.closed for context in contexts)  # one left open would hang the collection of garbage
    assert child.is_alive()
    child.kill()
    with pytest.raises(RuntimeError, match="closed engine"):
        raw.submit([5], params())


def _wait():
    import time

    time.sleep(60)
