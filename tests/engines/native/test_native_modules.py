import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from tiny_hybrids import FAMILIES, own_logprobs
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.cache import RowCache, cache_name
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.modules import ModuleForward, decode_attention, native_attention, native_mask
from lightrl.engines.native.own_cache import OwnCacheForward, SampleCaches

CPU = torch.device("cpu")


def causal(row, head, query, place):
    return place <= query


def window_of_two(row, head, query, place):
    return (place <= query) & (place > query - 2)


def test_each_row_is_masked_at_its_own_position():
    mask = native_mask(2, 1, 4, torch.tensor([0, 2]), mask_function=causal, device=CPU)
    assert (mask[:, 0, 0] == 0).tolist() == [[True, False, False, False], [True, True, True, False]]


def test_a_window_holds_in_prompts_and_rows():
    prompt = native_mask(2, 3, 3, 0, mask_function=window_of_two, local_size=2, device=CPU)
    assert (prompt[0, 0] == 0).tolist() == [[True, False, False], [True, True, False], [False, True, True]]
    rows = native_mask(1, 1, 4, torch.tensor([3]), mask_function=window_of_two, local_size=2, device=CPU)
    assert (rows[0, 0, 0] == 0).tolist() == [False, False, True, True]


def test_a_plain_prompt_needs_no_mask():
    assert native_mask(2, 3, 3, 0, mask_function=causal, device=CPU) is None
    assert native_mask(2, 3, 3, 0, mask_function=window_of_two, local_size=3, device=CPU) is None


def test_a_rule_that_indexes_tensors_is_taken_one_by_one():
    image = torch.tensor([[0, 1, 1, 0]])

    def rule(row, head, query, place):
        return (place <= query) | (image[row, query] == image[row, place])

    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex():
        mask = native_mask(1, 4, 4, 0, mask_function=rule, use_vmap=True, allow_is_causal_skip=False, device=CPU)
    assert (mask[0, 0, 1] == 0).tolist() == [True, True, True, False]


def test_decoding_equals_attention_with_repeated_keys():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    mask = native_mask(2, 1, 5, torch.tensor([1, 4]), mask_function=causal, device=CPU)
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = torch.tanh(scores / 1.5) * 1.5 + mask
    expected = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert_close(decode_attention(query, key, value, mask, 0.3, 1.5), expected, atol=1e-6, rtol=0)


def test_sinks_without_an_eager_function_are_refused():
    query = torch.zeros(1, 1, 1, 2)
    with pytest.raises(RuntimeError, match="no eager_attention_forward to fall back on"):
        native_attention(nn.Linear(1, 1), query, query, query, None, s_aux=torch.zeros(1))


def test_queries_of_llama_4_are_scaled_by_the_position_of_their_own_row():
    config = FAMILIES["llama4_text"]()
    config.floor_scale, config.attn_scale = 9, 2.0
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    engine = NativeEngine(copy.deepcopy(reference), eos_token_ids=(), device=CPU)
    params = SamplingParams(n=2, max_new_tokens=12, seed=1)
    for item in engine.generate([[5], [7, 8, 9, 10], list(range(3, 33))], [params] * 3):
        expected = own_logprobs(reference, item.prompt_token_ids, item.output_token_ids)
        assert_close(torch.tensor(item.logprobs), expected, atol=2e-5, rtol=0)
    assert type(engine._runner.forward_in_use) is ModuleForward


def renamed(plain):
    """The forward as since transformers 5.24: it takes and returns its cache as `cache`, and knows no other name."""
    name = cache_name(plain)

    def forward(input_ids, position_ids, use_cache, return_dict, cache=None, logits_to_keep=0):
        output = plain(input_ids, position_ids=position_ids, use_cache=use_cache, **{name: cache})
        return SimpleNamespace(logits=output.logits, cache=output[name])

    return forward


@pytest.mark.parametrize("forward", ["rows", "own"])
def test_a_model_that_calls_its_cache_by_the_new_name_is_run_alike(forward):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config).eval()
    whole = model(torch.tensor([[5, 7, 9]])).logits[0]
    model.forward = renamed(model.forward)
    if forward == "rows":
        ours, cache = ModuleForward(model, model), RowCache()
    else:
        ours, cache = OwnCacheForward(model, recomputes=False), SampleCaches()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # which the old names have there
        cache.reserve(1, 8, 1, 8)
        cache.begin_prefill(torch.tensor([0]), torch.tensor([0]))
        first = ours.prefill(torch.tensor([[5, 7]]), torch.tensor([1]), cache)
        cache.begin_decode(torch.tensor([2]), 2, 2)
        second = ours.decode(torch.tensor([9]), torch.tensor([2]), cache)
    assert_close(torch.cat([first, second]), whole[1:], atol=1e-6, rtol=0)
