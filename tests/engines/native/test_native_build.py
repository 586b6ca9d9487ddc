import pytest
import torch
from tiny_moe import tiny_moe
from torch.testing import assert_close

from lightrl.builtin.model import tiny_model
from lightrl.config import StrategyOptions
from lightrl.engines.base import EngineGroup, SamplingParams
from lightrl.engines.native.engine import build_native_engine, empty_copy

CPU = torch.device("cpu")


def test_the_copy_has_the_buffers_and_no_weight_of_the_source() -> None:
    source, _ = tiny_model()
    copy = empty_copy(source, torch.bfloat16, CPU)
    assert {name: p.shape for name, p in copy.named_parameters()} == {n: p.shape for n, p in source.named_parameters()}
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in copy.parameters())
    buffers = dict(source.named_buffers())
    assert buffers
    for name, buffer in copy.named_buffers():
        assert_close(buffer, buffers[name], atol=0, rtol=0)
        assert buffer.dtype == buffers[name].dtype  # rotary frequencies stay float32
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    mine = {p.untyped_storage().data_ptr() for p in copy.parameters()}
    assert not mine & {p.untyped_storage().data_ptr() for p in source.parameters()}


def test_a_router_in_bfloat16_chooses_experts_by_the_biases_of_the_source() -> None:
    source = tiny_moe("deepseek_v3")
    biases = {name: buffer for name, buffer in source.named_buffers() if name.endswith("e_score_correction_bias")}
    assert biases
    for buffer in biases.values():
        buffer.copy_(11 + 0.01 * torch.arange(len(buffer)))  # as large and as alike as those of DeepSeek-V3
    copy = dict(empty_copy(source, torch.bfloat16, CPU).named_buffers())
    for name, buffer in biases.items():
        assert_close(copy[name], buffer, atol=0, rtol=0)
        assert copy[name].data_ptr() != buffer.data_ptr()


def test_a_built_engine_generates_once_weights_have_come() -> None:
    source, tokenizer = tiny_model()
    engine = build_native_engine(
        source=source, tokenizer=tokenizer, options=StrategyOptions(), device=CPU, group=EngineGroup()
    )
    engine.load_weights(((name, p.detach()) for name, p in source.named_parameters()), version=3)
    ids = tokenizer("12+34=")["input_ids"]
    (found,) = engine.generate([ids], [SamplingParams(max_new_tokens=4, temperature=0)])
    logits = source(torch.tensor([[*ids, *found.output_token_ids]])).logits[0, len(ids) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(found.output_token_ids)
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(found.output_token_ids)[:, None])[:, 0]
    assert_close(torch.tensor(found.logprobs), chosen.detach(), atol=1e-5, rtol=0)
    assert set(found.versions) == {3}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss"])
def test_a_source_without_memory_gives_the_same_buffers(family, tiny_model) -> None:
    source = tiny_model(family)
    expected = empty_copy(source, torch.float32, CPU)
    found = empty_copy(source.to("meta"), torch.float32, CPU)
    assert [name for name, _ in found.named_buffers()] == [name for name, _ in expected.named_buffers()]
    for (name, buffer), (_, other) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        assert_close(buffer, other, atol=0, rtol=0, msg=name)


def test_it_needs_the_actor() -> None:
    with pytest.raises(ValueError, match=r"needs the actor.* the strategy's unwrap_model\(\) returned"):
        build_native_engine(source=None, tokenizer=None, options=StrategyOptions(), device=CPU, group=EngineGroup())
