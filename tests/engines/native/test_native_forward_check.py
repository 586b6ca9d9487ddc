import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightrl.engines.native.cache import RowCache
from lightrl.engines.native.forward import FusedForward
from lightrl.engines.native.forward_check import ForwardCheck, last_logits
from lightrl.engines.native.modules import ModuleForward

CPU = torch.device("cpu")


@pytest.mark.parametrize("make", [FusedForward, lambda model: ModuleForward(model, model)])
def test_a_forward_agrees_until_it_computes_something_else(make, tiny_model):
    model = tiny_model("mistral")
    with torch.inference_mode():
        forward, check = make(model), ForwardCheck(model, model, 61)
        assert check.has_weights
        assert check.agrees(forward, RowCache())
        model.lm_head.weight.data[7] += 0.1
        assert not check.agrees(forward, RowCache())


def test_weights_without_values_tell_nothing(tiny_model):
    model = tiny_model("mistral")
    with torch.inference_mode():
        model.lm_head.weight.data.zero_()
        assert not ForwardCheck(model, model, 61).has_weights
        model.lm_head.weight.data.fill_(float("nan"))
        assert not ForwardCheck(model, model, 61).has_weights


def test_a_model_that_fails_is_named_and_keeps_its_attention(tiny_model):
    model = tiny_model("mistral")
    model.model.embed_tokens = nn.Embedding(10, 32)  # the tokens that are compared go beyond
    usual = model.config._attn_implementation
    with pytest.raises(RuntimeError, match=r"does not reproduce the logits of MistralForCausalLM.*IndexError"):
        ForwardCheck(model, model, 61)
    assert model.config._attn_implementation == usual


def test_the_last_logits_are_those_of_whole_sequences(tiny_model):
    model, sequences = tiny_model("qwen3"), [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    with torch.inference_mode():
        found = last_logits(FusedForward(model), sequences, RowCache(), CPU)
        expected = [model(input_ids=torch.tensor([sequence])).logits[0, -3:] for sequence in sequences]
    assert_close(found, torch.stack(expected), atol=1e-5, rtol=0)
