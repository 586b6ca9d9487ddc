import logging

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.cache import RowCache
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.forward import ModelRunner

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_prefill_gives_the_logits_after_each_prompt(family, tiny_model):
    runner, reference = ModelRunner(tiny_model(family), CPU), tiny_model(family)
    prompts, cache, rows = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]], RowCache(), torch.arange(3)
    with torch.inference_mode():
        runner.verify(61, RowCache())
        cache.reserve(3, 8, 3, 8)
        logits = runner.prefill(prompts, rows, rows, cache)
        expected = torch.cat([reference(input_ids=torch.tensor([prompt])).logits[:, -1] for prompt in prompts])
    assert_close(logits, expected, atol=1e-5, rtol=0)
    assert runner.prefill_tokens == 11
    assert runner.uses_fused_forward == (family == "qwen3")


def test_a_fused_forward_that_differs_is_dropped(tiny_model, caplog):
    runner = ModelRunner(tiny_model("mistral"), CPU)
    runner._fused.scaling = 0.1
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        runner.verify(61, RowCache())
    assert not runner.uses_fused_forward
    assert "fused forward of MistralForCausalLM differs" in caplog.text


def test_a_fused_forward_that_the_tests_compare_is_taken_as_it_is(tiny_model, monkeypatch):
    monkeypatch.setattr(ModelRunner, "_choose_forward", None)
    runner = ModelRunner(tiny_model("qwen3"), CPU)
    runner.verify(61, RowCache())
    assert runner.uses_fused_forward


class ForgetsPositions(nn.Embedding):
    def forward(self, places):
        return super().forward(torch.arange(places.shape[1]).expand_as(places))


def test_a_model_that_no_cache_can_drive_runs_without(tiny_model, caplog):
    model = tiny_model("gpt2")
    model.transformer.wpe = ForgetsPositions(128, 32)
    engine = NativeEngine(model, eos_token_ids=(), device=CPU)
    with caplog.at_level(logging.WARNING):
        (item,) = engine.generate([[5, 6]], [SamplingParams(max_new_tokens=3)])
    assert "runs GPT2LMHeadModel without a cache" in caplog.text
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([[5, 6, *item.output_token_ids]]), use_cache=False).logits[0]
    expected = scores.log_softmax(-1)[1:-1].gather(1, torch.tensor(item.output_token_ids)[:, None])[:, 0]
    assert_close(torch.tensor(item.logprobs), expected, atol=1e-5, rtol=0)


def test_a_model_that_sees_later_tokens_is_refused(tiny_model):
    class SeesAll(nn.Embedding):
        def forward(self, places):
            return super().forward(places) * places.shape[1]

    model = tiny_model("gpt2")
    model.transformer.wpe = SeesAll(128, 32)
    engine = NativeEngine(model, eos_token_ids=(), device=CPU)
    engine.submit([5, 6], SamplingParams())
    with pytest.raises(RuntimeError, match="does not reproduce the logits of GPT2LMHeadModel, with or without"):
        engine.step()


def test_weights_that_are_still_unset_are_not_judged(tiny_model):
    model = tiny_model("mistral")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    runner = ModelRunner(model, CPU)
    with torch.inference_mode():
        runner.verify(61, RowCache())
    assert not runner.uses_fused_forward
