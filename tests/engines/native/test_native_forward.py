import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from lightrl.engines.native.forward import RMSNorm, is_supported


def test_rms_norm_by_hand_and_after_a_refresh():
    # mean of squares of (3, 4) is 12.5; with eps 3.5 the root is 4
    weight = torch.tensor([1.0, 2.0])
    norm = RMSNorm([weight], eps=3.5)
    assert_close(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.75, 2.0]]), atol=1e-6, rtol=0)
    weight.copy_(torch.tensor([4.0, 1.0]))
    norm.refresh()
    assert_close(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[3.0, 1.0]]), atol=1e-6, rtol=0)
    heads = RMSNorm([weight, 2 * weight], eps=3.5)(torch.tensor([[[3.0, 4.0], [3.0, 4.0]]]))
    assert_close(heads, torch.tensor([[[3.0, 1.0], [6.0, 2.0]]]), atol=1e-6, rtol=0)


def test_a_norm_of_bfloat16_is_rounded_once():
    # mean of squares of (1, 3) is 5; with eps 4 the root is 3. 1.25 / 3 = 213.3 / 512, and bfloat16 holds 512ths there;
    # 1 / 3 rounded by itself is 171 / 512, which times 1.25 would be 213.75 / 512.
    norm = RMSNorm([torch.tensor([1.25, 1.25], dtype=torch.bfloat16)], eps=4.0)
    result = norm(torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16))
    assert result.tolist() == [[213 / 512, 1.25]]
    assert result.dtype == torch.bfloat16


def test_refreshing_a_norm_whose_weights_are_dropped_waits_for_the_next_refresh():
    weight = torch.tensor([1.0, 2.0])
    norm = RMSNorm([weight], eps=3.5)
    num_bytes = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    norm.refresh()
    weight.untyped_storage().resize_(num_bytes)
    weight.fill_(4.0)
    norm.refresh()
    assert_close(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[3.0, 4.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("family", "is_known"),
    [("llama", True), ("mistral", True), ("qwen2", True), ("qwen3", True), ("gpt2", False), ("gemma2", False)],
)
def test_only_the_families_it_computes_exactly_are_taken(family, is_known, tiny_model):
    assert (is_supported(tiny_model(family))) == is_known


@pytest.mark.parametrize(
    "option",
    [
        {"mlp_bias": True},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_a_variant_that_it_does_not_compute_is_left_to_the_modules(option):
    shape = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, **option)
    assert not is_supported(LlamaForCausalLM(config))


def test_an_adapted_layer_is_left_to_the_modules(tiny_model):
    model = tiny_model("qwen3")

    class Adapted(nn.Linear):
        pass

    model.model.layers[1].mlp.down_proj = Adapted(48, 32, bias=False)
    assert not is_supported(model)
