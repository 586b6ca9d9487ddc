"""Decode steps that are replayed; a real CUDA graph is tested in tests/gpu/test_gpu_kernels.py."""

import pytest
import torch

from lightrl.engines.base import SamplingParams
from lightrl.engines.native import replay
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.forward import FusedForward
from lightrl.engines.native.replay import ReplayedForward, _rounded

CPU = torch.device("cpu")


@pytest.fixture
def captures(monkeypatch):
    """Captures that run again, counted; a replay that got no new inputs would repeat the old result."""
    counts = {"captured": 0, "replayed": 0}

    def capture(compute, _):
        counts["captured"] += 1
        result = compute()

        def again():
            counts["replayed"] += 1
            result.copy_(compute())

        return again, result

    monkeypatch.setattr(replay, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return counts


def engine_of(model, *, replayed):
    engine = NativeEngine(model, eos_token_ids=[7], device=CPU, max_num_seqs=16)
    if replayed:
        forward = engine._runner._fused
        assert isinstance(forward, FusedForward)
        engine._runner._fused = engine._runner._verified = ReplayedForward(forward)
    return engine


def generate(engine, *, seed=0):
    """Runs 13 requests of different lengths, which enter and leave at different steps."""
    for index in range(13):
        params = SamplingParams(max_new_tokens=3 + 25 * index, n=1 + index % 3, seed=seed + index)
        engine.submit([5, *range(8, 9 + index)], params)
    done = []
    while engine.has_unfinished():
        done += engine.step()
    return sorted(done, key=lambda item: (item.request_id, item.sample_index))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_replayed_steps_compute_what_single_operations_do(family, tiny_model, captures):
    plain = generate(engine_of(tiny_model(family), replayed=False))
    engine = engine_of(tiny_model(family), replayed=True)
    found = generate(engine)
    assert len(found) == len(plain) > 13
    for one, other in zip(found, plain, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert captures["replayed"] > 5 * captures["captured"] > 0


def test_new_weights_and_a_sleep_drop_what_was_captured(tiny_model, captures):
    engine = engine_of(tiny_model("qwen3"), replayed=True)
    generate(engine)
    assert engine._runner._fused._steps
    weights = [(name, parameter * 1.5) for name, parameter in tiny_model("qwen3").named_parameters()]
    engine.load_weights(weights, 1)
    assert not engine._runner._fused._steps
    engine.sleep(2)
    engine.wake("weights")
    engine.load_weights(weights, 2)
    engine.wake("kv_cache")
    found = generate(engine, seed=3)
    fresh = engine_of(tiny_model("qwen3"), replayed=False)
    fresh.load_weights(weights, 2)
    wanted = generate(fresh, seed=3)
    assert [item.output_token_ids for item in found] == [item.output_token_ids for item in wanted]


def test_shapes_are_rounded_up_by_a_quarter_at_most():
    assert [_rounded(count, 8) for count in (1, 8, 9, 64, 65, 100, 129)] == [8, 8, 16, 64, 80, 112, 160]
    assert [_rounded(count, 256) for count in (1, 257, 2048, 2049, 4100)] == [256, 512, 2048, 2560, 5120]
    assert all(count <= _rounded(count, 1) <= 1.25 * count + 1 for count in range(1, 3000))
