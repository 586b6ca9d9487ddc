"""The engine on models whose state does not fit its rows: each sample by the model's own cache."""

import pytest
import torch
from tiny_hybrids import FAMILIES, own_logprobs, tiny_model
from torch.testing import assert_close

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.engine import NativeEngine, empty_copy
from lightrl.engines.native.own_cache import SampleCaches

CPU = torch.device("cpu")
PARAMS = SamplingParams(n=3, max_new_tokens=7, temperature=1.0, seed=1, ignore_eos=True)
PROMPTS = ([5], [7, 8, 9], [11, 12, 13, 14, 15, 16, 17, 18, 19])


def synced_engine(family: str, **options) -> NativeEngine:
    """As a strategy makes it: an empty copy, whose weights come by a sync."""
    source = tiny_model(family)
    engine = NativeEngine(empty_copy(source, torch.float32, CPU), eos_token_ids=(2,), device=CPU, **options)
    engine.load_weights(list(source.named_parameters()), 1)
    return engine


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logprobs_equal_the_model_on_each_sequence_alone(family):
    reference, engine = tiny_model(family), synced_engine(family, max_num_seqs=5)  # a prompt's samples enter in parts
    done = engine.generate(PROMPTS, [PARAMS] * 3)
    assert len(done) == 9
    assert len({item.output_token_ids for item in done}) > 5
    for item in done:
        expected = own_logprobs(reference, item.prompt_token_ids, item.output_token_ids)
        # A state carried token by token rounds apart from one computed over a whole sequence.
        assert_close(torch.tensor(item.logprobs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "rwkv"])
def test_tokens_depend_neither_on_neighbours_nor_on_a_new_sync(family):
    engine = synced_engine(family, max_num_seqs=4)
    together = [item.output_token_ids for item in engine.generate(PROMPTS, [PARAMS] * 3)]
    assert engine.sleep(2) > 0
    engine.wake("weights")
    engine.load_weights(list(tiny_model(family).named_parameters()), 2)
    engine.wake("cache")
    alone = [item.output_token_ids for prompt in PROMPTS for item in engine.generate([prompt], [PARAMS])]
    assert alone == together


def test_a_state_that_was_read_stays_as_it_was():
    caches = SampleCaches()
    caches.states = [[torch.zeros(2)]]
    read = caches.read_row(0, 1)
    caches.states[0][0] += 1
    caches.write_rows(slice(0, 1), read, 1)
    caches.states[0][0] += 1
    assert read[0].tolist() == [0, 0]
    assert caches.states[0][0].tolist() == [1, 1]


def test_new_weights_change_what_is_generated():
    engine = synced_engine("lfm2")
    before = engine.generate(PROMPTS, [PARAMS] * 3)
    other = tiny_model("lfm2", seed=1)
    engine.load_weights(list(other.named_parameters()), 2)
    for item in engine.generate(PROMPTS, [PARAMS] * 3):
        expected = own_logprobs(other, item.prompt_token_ids, item.output_token_ids)
        assert_close(torch.tensor(item.logprobs), expected, atol=2e-5, rtol=0)
    assert before[0].versions == (1,) * 7


@pytest.mark.parametrize("part", ["layer", "draw"])
def test_a_step_is_repeated_after_a_failure_as_if_there_had_been_none(part, monkeypatch):
    """A failed step has moved the states of some samples on, and the layers of one in part."""
    expected = synced_engine("qwen3_next").generate(PROMPTS, [PARAMS] * 3)
    engine = synced_engine("qwen3_next")
    engine.generate([[5]], [PARAMS])  # its forward is chosen
    owner, name = (engine, "draw") if part == "draw" else (engine.model.model.layers[1], "forward")
    work, num_calls, num_failures = getattr(owner, name), 0, 0

    def run_out(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls in failing:
            raise MemoryError
        return work(*args, **kwargs)

    failing = (4,) if part == "draw" else (1, 13, 35)  # in the first sample of a step, and in later ones
    for prompt in PROMPTS:
        engine.submit(prompt, PARAMS)
    found = engine.step()
    monkeypatch.setattr(owner, name, run_out)
    while engine.has_unfinished():
        try:
            found += engine.step()
        except MemoryError:
            num_failures += 1
    assert num_failures == len(failing)
    found = sorted(found, key=lambda item: (item.request_id, item.sample_index))
    assert [item.output_token_ids for item in found] == [item.output_token_ids for item in expected]
    for item, same in zip(found, expected, strict=True):
        assert_close(torch.tensor(item.logprobs), torch.tensor(same.logprobs), atol=2e-5, rtol=0)


def test_states_are_moved_copied_and_freed():
    caches = SampleCaches()
    caches.reserve(3, 8, 4, 8)
    caches.begin_prefill(torch.tensor([0, 1]), torch.tensor([0, 0]))
    state = [torch.zeros(5)]
    caches.store_prompt(0, state)
    caches.states[0][0] += 1
    assert [float(caches.states[row][0].sum()) for row in (0, 1)] == [5.0, 0.0]
    caches.move_rows(torch.tensor([1]), torch.tensor([2]), 0)
    assert caches.states[1] is None
    caches.write_rows(slice(0, 2), caches.read_row(2, 0), 0)
    assert len({id(row[0]) for row in caches.states}) == 3
    assert caches.free() == 3 * 5 * 4
    assert caches.states == []
