import random

import pytest
import torch
from torch.testing import assert_close

from lightrl.engines.base import SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native import products
from lightrl.engines.native.engine import NativeEngine

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen2", "qwen3", "gpt2", "gemma2", "mistral", "qwen3_moe", "gpt_oss"]


@pytest.fixture
def make_engine(tiny_model):
    def make(family="qwen3", seed=0, **options):
        return NativeEngine(tiny_model(family, seed), **{"eos_token_ids": (2,), "device": CPU, **options})

    return make


def random_requests(count, seed=0, vocab=61):
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(rng.choice([1, 2, 5, 9, 14]))] for _ in range(count)]
    params = [
        SamplingParams(
            max_new_tokens=rng.choice([1, 3, 8, 40]),  # long-tailed
            temperature=rng.choice([0.7, 1.0, 1.5]),
            seed=rng.randrange(1000),
            n=rng.choice([1, 3]),
        )
        for _ in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("part", ["_reserve", "_prefill", "_sampling_plan", "draw"])
def test_a_failure_while_samples_enter_changes_none_of_them(part, make_engine, monkeypatch):
    prompts, params = random_requests(7)
    expected = make_engine(max_num_seqs=4).generate(prompts, params)
    engine = make_engine(max_num_seqs=4)
    found, work, admit, entering = [], getattr(engine, part), engine._scheduler.admit, []

    def run_out(*args):
        if entering and entering[-1]:
            entering[-1] = False
            raise MemoryError
        return work(*args)

    def enter():
        admissions = admit()
        entering.append(bool(admissions) and len(entering) % 2 == 0)  # every other time
        return admissions

    monkeypatch.setattr(engine, part, run_out)
    monkeypatch.setattr(engine._scheduler, "admit", enter)
    for prompt, param in zip(prompts, params, strict=True):
        engine.submit(prompt, param)
    num_failures = 0
    while engine.has_unfinished():
        try:
            found += engine.step()
        except MemoryError:
            num_failures += 1
    assert num_failures > 2
    found = sorted(found, key=lambda item: (item.request_id, item.sample_index))
    assert [item.output_token_ids for item in found] == [item.output_token_ids for item in expected]


def reference_logprobs(model, completion, temperature):
    """Of the output tokens, by the plain model over the whole sequence."""
    ids = torch.tensor([completion.prompt_token_ids + completion.output_token_ids])
    with torch.no_grad():
        scores = (model(input_ids=ids, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    start = len(completion.prompt_token_ids)
    return scores[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_the_plain_model_over_the_whole_sequence(family, make_engine, tiny_model):
    reference = tiny_model(family)
    prompts, params = random_requests(9)
    engine = make_engine(family, max_num_seqs=5)
    done = engine.generate(prompts, params)
    assert engine._runner.uses_fused_forward == (family in ("llama", "qwen2", "qwen3", "mistral"))
    assert len(done) == sum(param.n for param in params)
    assert max(len(item.output_token_ids) for item in done) > 20  # past every sliding window
    for item in done:
        expected = reference_logprobs(reference, item, params[item.request_id].temperature)
        assert_close(torch.tensor(item.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_modules_give_what_the_fused_forward_gives(family, make_engine):
    prompts, params = random_requests(6, seed=2)
    fused, modules = make_engine(family), make_engine(family)
    modules._runner._fused = None
    for one, other in zip(fused.generate(prompts, params), modules.generate(prompts, params), strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)
    assert not modules._runner.uses_fused_forward


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_filtered_logprobs_are_of_the_distribution_sampled_from(family, make_engine, tiny_model):
    params = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=4, top_p=0.9, seed=5, ignore_eos=True)
    (item,) = make_engine(family).generate([[5, 6, 7]], [params])
    ids = torch.tensor([item.prompt_token_ids + item.output_token_ids])
    with torch.no_grad():
        logits = tiny_model(family)(input_ids=ids).logits[0, 2:-1] / 0.8
    for scores, token, logprob in zip(logits, item.output_token_ids, item.logprobs, strict=True):
        top = scores.sort(descending=True)
        four = top.values[:4].softmax(-1)
        kept = [place for place in range(4) if float(four[:place].sum()) < 0.9]
        place = top.indices.tolist().index(token)
        assert place in kept
        assert abs(logprob - float((four[place] / four[kept].sum()).log())) < 1e-5


def test_greedy_takes_the_highest_and_reports_its_logprob_at_temperature_one(make_engine, tiny_model):
    (item,) = make_engine().generate([[5, 6, 7]], [SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)])
    ids = torch.tensor([item.prompt_token_ids + item.output_token_ids])
    with torch.no_grad():
        scores = tiny_model("qwen3")(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
    assert item.output_token_ids == tuple(scores.argmax(-1).tolist())
    assert_close(torch.tensor(item.logprobs), scores.amax(-1), atol=1e-5, rtol=0)


def test_tokens_do_not_depend_on_what_else_runs(make_engine):
    prompts, params = random_requests(14, seed=3)
    alone = make_engine(max_num_seqs=1)
    expected = {}
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        expected[index] = [item.output_token_ids for item in alone.generate([prompt], [param])]
    for num_slots, shuffle_seed in ((3, 1), (7, 2), (256, 3)):
        order = list(range(14))
        random.Random(shuffle_seed).shuffle(order)
        done = make_engine(max_num_seqs=num_slots).generate([prompts[i] for i in order], [params[i] for i in order])
        for place, index in enumerate(order):
            got = [item.output_token_ids for item in done if item.request_id == place]
            assert got == expected[index]


def test_prompts_that_are_run_in_groups_keep_their_order(make_engine):
    """A long prompt is run after the short ones, among which it was given."""
    prompts = [[5], [*range(3, 58), *range(3, 58)], [7], [9]]
    params = SamplingParams(max_new_tokens=1)
    done = make_engine().generate(prompts, [params] * 4)
    alone = [make_engine().generate([prompt], [params])[0] for prompt in prompts]
    logprobs, expected = ([item.logprobs[0] for item in items] for items in (done, alone))
    assert [item.output_token_ids for item in done] == [item.output_token_ids for item in alone]
    assert_close(torch.tensor(logprobs), torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_rows_that_are_sorted_and_read_in_parts_give_the_same_logprobs(family, make_engine, tiny_model, monkeypatch):
    monkeypatch.setattr("lightrl.engines.native.engine.LEAST_SAVED_ON_CPU", 8)
    reference, engine, seen = tiny_model(family), make_engine(family, eos_token_ids=()), []
    begin = engine._cache.begin_decode
    monkeypatch.setattr(engine._cache, "begin_decode", lambda *given: (seen.append(len(given[3])), begin(*given)))
    reorder, sorts = engine._scheduler.reorder, []
    monkeypatch.setattr(engine._scheduler, "reorder", lambda order: (sorts.append(order), reorder(order))[1])
    rng = random.Random(5)
    prompts = [[rng.randrange(61) for _ in range(length)] for length in (3, 30, 2, 41, 5, 4, 2, 38, 3, 6)]
    params = [SamplingParams(max_new_tokens=rng.choice([4, 9, 20]), seed=i) for i in range(10)]
    done = engine.generate(prompts, params)
    assert sorts  # the long prompts lay between short ones
    assert max(seen) >= 2
    for item in done:
        expected = reference_logprobs(reference, item, 1.0)
        assert_close(torch.tensor(item.logprobs), expected, atol=1e-5, rtol=0)
    alone = make_engine(family, eos_token_ids=(), max_num_seqs=1)
    expected = [alone.generate([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    assert [item.output_token_ids for item in done] == [item.output_token_ids for item in expected]


@pytest.mark.skipif(not products._can_pack(torch.float32), reason="torch has no packed products on this processor")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_packed_weights_follow_what_is_loaded_and_slept_through(family, make_engine, tiny_model, monkeypatch):
    monkeypatch.setitem(products.LEAST_PACKED, torch.float32, 1)
    engine, other = make_engine(family), tiny_model(family, seed=7)
    for version, level in ((1, 1), (2, 2)):
        engine.sleep(level)
        engine.wake("weights")
        engine.load_weights(other.named_parameters(), version)
        engine.wake("cache")
        prompts, params = random_requests(5, seed=version)
        done = engine.generate(prompts, params)
        for item in done:
            expected = reference_logprobs(other, item, params[item.request_id - done[0].request_id].temperature)
            assert_close(torch.tensor(item.logprobs), expected, atol=1e-5, rtol=0)
        assert engine._runner._fused.layers[0].qkv._packed._packed is not None
    engine.sleep(1)
    assert engine._runner._fused.layers[0].qkv._packed._packed is None


def test_requests_that_arrive_later_share_the_batch(make_engine):
    prompts, params = random_requests(6, seed=4)
    together = [item.output_token_ids for item in make_engine().generate(prompts, params)]
    engine, done = make_engine(max_num_seqs=4), []
    for prompt, param in zip(prompts, params, strict=True):
        engine.submit(prompt, param)
        done += engine.step()
    while engine.has_unfinished():
        done += engine.step()
    done.sort(key=lambda item: (item.request_id, item.sample_index))
    assert [item.output_token_ids for item in done] == together


def test_samples_of_a_prompt_prefill_once_and_differ(make_engine):
    engine = make_engine(max_num_seqs=3)  # five samples: the last two enter when slots come free
    params = SamplingParams(max_new_tokens=8, n=5, ignore_eos=True, seed=1)
    done = engine.generate([[7, 8, 9, 10]], [params])
    assert engine.num_prefill_tokens == 4
    assert [item.sample_index for item in done] == [0, 1, 2, 3, 4]
    assert len({item.output_token_ids for item in done}) == 5
    one = make_engine().generate([[7, 8, 9, 10]], [params])
    assert [item.output_token_ids for item in done] == [item.output_token_ids for item in one]


def test_a_waiting_sibling_prefills_again_after_a_weight_update(make_engine, tiny_model):
    engine = make_engine(max_num_seqs=1)
    engine.submit([7, 8, 9], SamplingParams(max_new_tokens=1, n=2))
    engine.step()
    engine.load_weights(list(tiny_model("qwen3", 1).named_parameters()), version=1)
    (second,) = engine.step()
    assert engine.num_prefill_tokens == 6
    assert second.versions == (1,)
    expected = reference_logprobs(tiny_model("qwen3", 1), second, 1.0)
    assert_close(torch.tensor(second.logprobs), expected, atol=1e-5, rtol=0)


def test_end_tokens_stop_tokens_and_limits_give_the_reasons(make_engine):
    free = SamplingParams(max_new_tokens=30, seed=9, ignore_eos=True)
    (whole,) = make_engine().generate([[5, 6]], [free])
    assert (whole.finish_reason, len(whole.output_token_ids)) == ("length", 30)
    end = whole.output_token_ids[4]
    first = whole.output_token_ids.index(end) + 1
    (by_eos,) = make_engine(eos_token_ids=(60, end)).generate([[5, 6]], [SamplingParams(max_new_tokens=30, seed=9)])
    assert (by_eos.finish_reason, by_eos.output_token_ids) == ("stop", whole.output_token_ids[:first])
    stopping = SamplingParams(max_new_tokens=30, seed=9, ignore_eos=True, stop_token_ids=(end,))
    (by_stop,) = make_engine(eos_token_ids=()).generate([[5, 6]], [stopping])
    assert (by_stop.finish_reason, by_stop.output_token_ids) == ("stop", whole.output_token_ids[:first])


def test_abort_returns_what_is_there_and_the_rest_goes_on(make_engine):
    prompts = [[5, 6], [7, 8], [9, 10]]
    params = [SamplingParams(max_new_tokens=12, seed=i, ignore_eos=True, n=2, temperature=1.0 + i) for i in range(3)]
    expected = make_engine().generate(prompts, params)
    engine = make_engine(max_num_seqs=5)  # one sample of request 2 waits
    for prompt, param in zip(prompts, params, strict=True):
        engine.submit(prompt, param)
    engine.step()
    aborted = engine.abort([0, 2])
    assert [(item.request_id, item.sample_index, len(item.output_token_ids)) for item in aborted] == [
        (0, 0, 2),
        (0, 1, 2),
        (2, 0, 2),
        (2, 1, 0),
    ]
    assert {item.finish_reason for item in aborted} == {"abort"}
    assert aborted[0].output_token_ids == expected[0].output_token_ids[:2]
    assert len(aborted[0].logprobs) == len(aborted[0].versions) == 2
    rest = []
    while engine.has_unfinished():
        rest += engine.step()
    assert [item.output_token_ids for item in rest] == [item.output_token_ids for item in expected[2:4]]
    assert engine.abort() == []


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_weights_loaded_in_flight_stamp_later_tokens_and_keep_the_cache(family, make_engine, tiny_model):
    engine = make_engine(family)
    engine.submit([5, 6, 7], SamplingParams(max_new_tokens=6, seed=2, ignore_eos=True))
    engine.step()  # two tokens: one from the prompt, one decoded
    engine.load_weights(list(tiny_model(family, 1).named_parameters()), version=7)
    done = []
    while engine.has_unfinished():
        done += engine.step()
    (mixed,) = done
    assert mixed.versions == (0, 0, 7, 7, 7, 7)
    old, new = reference_logprobs(tiny_model(family), mixed, 1.0), reference_logprobs(tiny_model(family, 1), mixed, 1.0)
    assert_close(torch.tensor(mixed.logprobs[:2]), old[:2], atol=1e-5, rtol=0)
    assert (torch.tensor(mixed.logprobs[2:]) - new[2:]).abs().max() > 1e-3  # the old keys are still looked at
    (after,) = engine.generate([[5, 6, 7]], [SamplingParams(max_new_tokens=6, seed=2)])
    assert_close(torch.tensor(after.logprobs), reference_logprobs(tiny_model(family, 1), after, 1.0), atol=1e-5, rtol=0)
    assert set(after.versions) == {7}


def test_a_bad_prompt_is_named_and_takes_no_id(make_engine):
    engine = ColocatedEngine(make_engine(max_model_len=10))
    engine.version = 0  # it has its weights
    with pytest.raises(ValueError, match="the prompt of request 0 is empty"):
        engine.submit([], SamplingParams())
    with pytest.raises(ValueError, match="request 0 holds token id 61, outside the model's vocabulary of 61"):
        engine.submit([3, 61, -1], SamplingParams())
    with pytest.raises(ValueError, match="request 0 has 4 tokens; with max_new_tokens 7 that is beyond"):
        engine.submit([3, 4, 5, 6], SamplingParams(max_new_tokens=7))
    assert engine.submit([3, 4, 5, 6], SamplingParams(max_new_tokens=6, ignore_eos=True)) == 0
    assert engine.submit([3], SamplingParams(max_new_tokens=1)) == 1
    while engine.has_unfinished():
        engine.step()


def test_max_model_len_beyond_the_positions_is_refused(make_engine):
    with pytest.raises(ValueError, match="max_model_len is 129: the model has 128 positions"):
        make_engine(max_model_len=129)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_every_position_of_max_model_len_can_be_used(family, make_engine, tiny_model):
    engine = make_engine(family, max_model_len=45)
    (item,) = engine.generate([[5] * 5], [SamplingParams(max_new_tokens=40, ignore_eos=True)])
    assert_close(torch.tensor(item.logprobs), reference_logprobs(tiny_model(family), item, 1.0), atol=1e-5, rtol=0)


def test_sleep_frees_the_cache_and_wake_brings_the_engine_back(make_engine):
    engine, params = make_engine(), [SamplingParams(max_new_tokens=8, seed=3)]
    before = engine.generate([[5, 6]], params)
    layers = list(engine._cache.storage)
    num_bytes = sum(layer.num_bytes() for layer in layers)
    assert num_bytes > 0
    assert engine.sleep() == num_bytes
    assert all(
        layer.keys.untyped_storage().nbytes() == layer.values.untyped_storage().nbytes() == 0 for layer in layers
    )
    assert engine.sleep() == 0
    with pytest.raises(RuntimeError, match=r"submit\(\) while the engine sleeps: call wake\(\) first"):
        engine.submit([5], SamplingParams())
    for part in ("weights", "kv_cache", "kv_cache"):
        engine.wake(part)
    after = engine.generate([[5, 6]], params)
    assert [item.output_token_ids for item in after] == [item.output_token_ids for item in before]


@pytest.mark.parametrize("is_freed", [False, True])
def test_ctrl_c_on_the_way_to_sleep_leaves_an_engine_that_is_awake(is_freed, make_engine, monkeypatch):
    engine, params = make_engine(), [SamplingParams(max_new_tokens=8, seed=3)]
    before = engine.generate([[5, 6]], params)
    free = engine._cache.free

    def interrupted():
        if is_freed:
            free()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._cache, "free", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.sleep()
    after = engine.generate([[5, 6]], params)
    assert [item.output_token_ids for item in after] == [item.output_token_ids for item in before]
    assert engine.sleep() > 0


def test_sleep_is_refused_while_requests_are_unfinished(make_engine):
    engine = make_engine(max_num_seqs=1)
    engine.submit([5], SamplingParams(max_new_tokens=5, ignore_eos=True))
    engine.submit([6], SamplingParams())
    engine.step()
    with pytest.raises(RuntimeError, match="1 sequences running and 1 requests waiting"):
        engine.sleep()
    engine.abort()
    engine.sleep()


def test_a_closed_engine_says_so(make_engine):
    engine = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match=r"step\(\) on a closed engine"):
        engine.step()


def test_logits_that_are_not_finite_name_the_request(make_engine):
    engine = make_engine()
    engine.submit([5], SamplingParams(max_new_tokens=5, ignore_eos=True))
    engine.step()
    broken = [(name, torch.full_like(tensor, float("nan"))) for name, tensor in engine.model.named_parameters()]
    engine.load_weights(broken, version=3)
    with pytest.raises(RuntimeError, match="request 0, token 2, weight version 3"):
        engine.step()
    engine = make_engine()
    engine.submit([5], SamplingParams(max_new_tokens=5, ignore_eos=True))
    engine.step()
    engine.load_weights(broken, version=3)
    engine.submit([6], SamplingParams(max_new_tokens=5, ignore_eos=True))
    with pytest.raises(RuntimeError, match="request 1, token 0, weight version 3"):
        engine.step()


def test_requests_that_were_set_aside_go_on_as_if_nothing_had_been(make_engine, tiny_model):
    prompts, params = random_requests(5, seed=4)

    def begun():
        engine = ColocatedEngine(make_engine())
        engine.update_weights(tiny_model("qwen3").named_parameters(), 0)
        for prompt, param in zip(prompts, params, strict=True):
            engine.submit(prompt, param)
        return engine, [*engine.step(), *engine.step()]

    def finished(engine, done):
        while engine.has_unfinished():
            done += engine.step()
        return {(item.request_id, item.sample_index): item.output_token_ids for item in done}

    engine, done = begun()
    with engine.set_aside():
        assert not engine.has_unfinished()
        assert len(engine.generate(prompts[:1], [SamplingParams(max_new_tokens=3, n=2)])) == 2
    assert finished(engine, done) == finished(*begun())


def test_an_end_token_outside_the_vocabulary_is_told_with_what_may_name_it(make_engine):
    with pytest.raises(ValueError, match=r"End tokens \[151645\] are outside .* of 61.* generation_config.json"):
        make_engine(eos_token_ids=(2, 151645))
