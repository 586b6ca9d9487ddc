"""The experts that the native engine returns are those of a plain forward over the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrl.config import StrategyOptions
from lightrl.engines.base import Completion, EngineGroup, SamplingParams, create_recording_engine
from lightrl.engines.native.own_cache import OwnCacheForward, SampleCaches
from lightrl.engines.native.recording import RecordingEngine
from lightrl.models.routing import routers_of

CPU = torch.device("cpu")
PROMPTS = ([5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15])


def own_experts(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    kept: list[torch.Tensor] = []
    handles = [
        router.module.register_forward_hook(lambda m, a, out, router=router: kept.append(router.experts(out)))
        for router in routers_of(model)
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return torch.stack(kept, dim=1).numpy()


def check(model: torch.nn.Module, done: Completion) -> None:
    tokens = [*done.prompt_token_ids, *done.output_token_ids]
    assert done.routing is not None
    assert done.routing.shape[0] == len(tokens) - 1
    expected = own_experts(model, tokens)[: len(tokens) - 1]
    assert (np.sort(done.routing, -1) == np.sort(expected, -1)).all()


@pytest.mark.parametrize("max_num_seqs", [3, 16])
def test_experts_are_those_of_a_plain_forward(tiny_model, max_num_seqs: int) -> None:
    model = tiny_model("qwen3_moe")
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    engine = RecordingEngine(model, eos_token_ids=[2], device=CPU, max_num_seqs=max_num_seqs)
    params = [SamplingParams(max_new_tokens=3 + i, n=3, seed=i, ignore_eos=i % 2 == 0) for i in range(len(PROMPTS))]
    done = engine.generate(PROMPTS, params)
    assert len(done) == 12
    for completion in done:
        check(plain, completion)
    assert (engine._prompts, engine._samples) == ({}, {})

    first, second = (engine.submit(prompt, SamplingParams(max_new_tokens=9, n=2)) for prompt in PROMPTS[:2])
    for _ in range(3):
        engine.step()
    for completion in engine.abort([first]):
        check(plain, completion)
    rest = [item for _ in range(9) for item in engine.step()]
    assert {item.request_id for item in rest} == {second}
    for completion in rest:
        check(plain, completion)
    assert (engine._prompts, engine._samples) == ({}, {})


def test_a_step_that_is_repeated_after_a_failure_is_recorded_once(tiny_model, monkeypatch) -> None:
    model = tiny_model("qwen3_moe")
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    engine = RecordingEngine(model, eos_token_ids=[2], device=CPU)
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=4, ignore_eos=True))
    engine.step()

    def run_out(*args):
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(engine, "draw", run_out)
    with pytest.raises(MemoryError):
        engine.step()
    (done,) = [item for _ in range(3) for item in engine.step()]
    check(plain, done)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_model_with_a_cache_of_its_own_runs_every_sample_by_itself(tiny_model, recomputes: bool) -> None:
    """As Qwen3-Next does; `recomputes`: as a model whose cache is of no use."""
    model, plain = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    engine = RecordingEngine(model, eos_token_ids=[2], device=CPU, max_num_seqs=5)
    engine._runner._verified = OwnCacheForward(model, recomputes=recomputes)
    engine._cache = SampleCaches()
    done = engine.generate(PROMPTS, [SamplingParams(max_new_tokens=3, n=2, ignore_eos=True)] * len(PROMPTS))
    assert len(done) == 8
    for completion in done:
        check(plain, completion)


def test_it_is_built_in_place_of_the_plain_engine(tiny_model) -> None:
    parts = {"tokenizer": None, "options": StrategyOptions(), "device": CPU, "group": EngineGroup()}
    assert isinstance(create_recording_engine("native", source=tiny_model("qwen3_moe"), **parts), RecordingEngine)
    with pytest.raises(ValueError, match="qwen3 has no router"):
        create_recording_engine("native", source=tiny_model("qwen3"), **parts)
    with pytest.raises(ValueError, match="needs an engine that returns the experts"):
        create_recording_engine(
            "lightrl.engines.native.engine:build_native_engine", source=tiny_model("qwen3_moe"), **parts
        )
