"""--native.share_weights: the engine reads the trainer's memory, and refuses to generate from weights of no version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightrl.config import GRPOConfig, StrategyOptions
from lightrl.config.native import NativeEngineConfig
from lightrl.engines.base import EngineGroup, EnginePrompt, SamplingParams, WeightSyncError
from lightrl.engines.native.engine import build_native_engine
from lightrl.engines.native.lent import LentEngine
from lightrl.strategy.torch_native import SingleStrategy

PROMPTS = [[5, 6, 7, 8], [9, 10]]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)


def make_engine(source: Any, *, is_lent: bool = True) -> Any:
    options = StrategyOptions(native=NativeEngineConfig(share_weights=is_lent))
    parts = {"tokenizer": None, "device": torch.device("cpu"), "group": EngineGroup()}
    return build_native_engine(source=source, options=options, **parts)


def sync(engine: Any, source: nn.Module, version: int) -> None:
    engine.load_weights([(name, item.detach()) for name, item in sorted(source.named_parameters())], version)


def storages(model: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


@torch.no_grad()
def change(source: nn.Module) -> None:
    for parameter in source.parameters():
        parameter.mul_(1.01)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "qwen3_moe", "gemma2"])
def test_weights_are_in_memory_once_and_the_engine_generates_from_them(family, tiny_model):
    source = tiny_model(family)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        before = source(ids).logits
    engine, own = make_engine(source), make_engine(source, is_lent=False)
    assert isinstance(engine, LentEngine)
    assert storages(engine.model) == storages(source) != storages(own.model)
    with torch.no_grad():
        assert torch.equal(source(ids).logits, before)
    for version in (1, 2):
        for each in (engine, own):
            sync(each, source, version)
        got, expected = (each.generate(PROMPTS, [GREEDY] * 2) for each in (engine, own))
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.output_token_ids == theirs.output_token_ids
            assert set(ours.versions) == {version}
            assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-5, rtol=0)
        change(source)


def test_the_trainer_still_learns(tiny_model):
    sources = [tiny_model("qwen3"), tiny_model("qwen3")]
    make_engine(sources[1])
    for source in sources:
        optimizer = torch.optim.AdamW(source.parameters(), lr=1e-2)
        for _ in range(2):
            source(torch.tensor([PROMPTS[0]])).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, alone), lent in zip(sources[0].named_parameters(), sources[1].parameters(), strict=True):
        assert torch.equal(alone, lent), name
        assert lent.requires_grad


def test_weights_that_changed_since_the_sync_do_not_generate(tiny_model):
    source = tiny_model("qwen3")
    engine = make_engine(source)
    sync(engine, source, 3)
    engine.submit(PROMPTS[0], GREEDY)
    engine.step()
    with torch.no_grad():
        source.model.norm.weight.add_(0.5)
    with pytest.raises(RuntimeError, match="The weights changed since the weight sync to version 3, and the engine"):
        engine.step()
    sync(engine, source, 4)
    (done,) = [item for _ in range(5) for item in engine.step()]
    assert done.versions == (3, 3, 4, 4, 4, 4)  # a prompt's step draws the first token and one more


def test_what_lies_elsewhere_is_named(tiny_model):
    source = tiny_model("qwen3")
    engine = make_engine(source)
    layers: Any = source.model.layers
    first, second = layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight
    first.data, second.data = second.data, first.data
    source.model.norm.weight.data = source.model.norm.weight.data.clone()
    with pytest.raises(WeightSyncError) as error:
        sync(engine, source, 1)
    named = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    assert all(f"{name} is not in the memory that the engine reads" in str(error.value) for name in named)
    assert str(error.value).count(" is not in the memory") == len(named)


def test_a_weight_that_does_not_come_is_named(tiny_model):
    source = tiny_model("qwen3")
    engine = make_engine(source)
    del source.model.layers[2]
    with pytest.raises(WeightSyncError, match="missing model.layers.2"):
        sync(engine, source, 1)


def test_it_sleeps_at_level_1_and_leaves_the_weights_when_it_closes(tiny_model):
    source = tiny_model("qwen3")
    engine = make_engine(source)
    assert engine.sleep_levels == (1,)
    sync(engine, source, 1)
    expected = engine.generate(PROMPTS, [GREEDY] * 2)
    engine.sleep(1)
    change(source)
    sync(engine, source, 2)
    engine.wake("weights")
    engine.wake("kv_cache")
    assert engine.generate(PROMPTS, [GREEDY] * 2) != expected
    engine.close()
    assert all(parameter.isfinite().all() for parameter in source.parameters())


def test_weights_of_another_type_are_refused(tiny_model):
    with pytest.raises(ValueError, match=r"--native.share_weights True needs every weight whole.*bfloat16 on cpu"):
        make_engine(tiny_model("qwen3").to(torch.bfloat16))


def test_a_strategy_proves_its_syncs_with_it(tiny_model):
    options = GRPOConfig(strategy="single", native=NativeEngineConfig(share_weights=True), canary_every=1)
    strategy = SingleStrategy(0, 1.0, 1, 1, options)
    strategy.setup_distributed()
    source = tiny_model("qwen3")
    policy = strategy.prepare_model(source)
    strategy.setup_inference_engine(None, "native", actor=policy)
    change(source)
    strategy.update_engine_weights(policy)
    report = strategy.serving.last_sync
    assert report is not None
    assert report.num_bytes == sum(parameter.nbytes for parameter in source.parameters())
    assert report.canary is not None
    assert report.canary < 1e-4
    change(source)
    with pytest.raises(RuntimeError, match="Call update_engine_weights"):
        strategy.generate([EnginePrompt(token_ids=(5, 6, 7))], [GREEDY])
    strategy.update_engine_weights(policy)
    strategy.generate([EnginePrompt(token_ids=(5, 6, 7))], [GREEDY])
    strategy.close()
