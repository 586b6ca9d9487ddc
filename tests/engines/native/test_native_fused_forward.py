import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from lightrl.engines.native.fused_forward import FusedForward, FusedLinear


def test_fused_linear_equals_its_layers_and_follows_their_parameters():
    layers = [nn.Linear(3, 2), nn.Linear(3, 4)]
    inputs = torch.randn(5, 3)
    expected = torch.cat([layer(inputs) for layer in layers], dim=1)
    fused = FusedLinear(layers)
    assert_close(fused(inputs), expected)
    with torch.no_grad():
        layers[1].weight.fill_(1.0)
        layers[1].bias.fill_(0.5)
    assert_close(fused(inputs)[:, 2:], (inputs.sum(1, keepdim=True) + 0.5).expand(-1, 4))


def test_refresh_fuses_parameters_that_got_storage_of_their_own():
    layers = [nn.Linear(3, 2, bias=False), nn.Linear(3, 4, bias=False)]
    fused = FusedLinear(layers)
    layers[0].weight.data = torch.ones(2, 3)
    fused.refresh()
    inputs = torch.randn(5, 3)
    assert_close(fused(inputs), torch.cat([layer(inputs) for layer in layers], dim=1))


@pytest.mark.parametrize(
    ("family", "is_known"),
    [("llama", True), ("mistral", True), ("qwen2", True), ("qwen3", True), ("gpt2", False), ("gemma2", False)],
)
def test_only_the_families_it_computes_exactly_are_taken(family, is_known, tiny_model):
    assert (FusedForward.build(tiny_model(family)) is not None) == is_known


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
    assert FusedForward.build(LlamaForCausalLM(config)) is None


def test_an_adapted_layer_is_left_to_the_modules(tiny_model):
    model = tiny_model("qwen3")

    class Adapted(nn.Linear):
        pass

    model.model.layers[1].mlp.down_proj = Adapted(48, 32, bias=False)
    assert FusedForward.build(model) is None
