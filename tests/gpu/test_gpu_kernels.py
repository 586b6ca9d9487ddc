"""Kernels, addresses and random numbers that only a GPU has; one device is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from lightrl.builtin.model import tiny_model
from lightrl.config import StrategyOptions
from lightrl.engines.base import SamplingParams
from lightrl.engines.native.eager import EagerEngine
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.replay import ReplayedForward
from lightrl.models.packed_attention import grouped_attention, visible
from lightrl.models.policy import Policy
from lightrl.strategy.saving.saver import _random_state, _set_random_state
from lightrl.strategy.torch_native import SingleStrategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_grouped_attention_goes_to_a_fused_kernel(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 40, 64, requires_grad=True) for heads in (4, 2, 2))
    mask = None if window is None else visible(40, 40, window, torch.device("cpu"))
    wanted = grouped_attention(query, key, value, mask, 0.1)
    wanted.sum().backward()
    there = [part.detach().to("cuda", dtype).requires_grad_() for part in (query, key, value)]
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(fused):  # without one of them torch raises an error
        found = grouped_attention(*there, None if mask is None else mask.cuda(), 0.1)
    found.float().sum().backward()
    assert_close(found.detach().float().cpu(), wanted.detach(), atol=tolerance, rtol=0)
    for part, plain in zip(there, (query, key, value), strict=True):
        assert part.grad is not None
        assert_close(part.grad.float().cpu(), plain.grad, atol=10 * tolerance, rtol=0)


@pytest.mark.parametrize("level", [1, 2])
def test_the_engine_generates_the_same_after_its_memory_has_moved(level: int) -> None:
    options = StrategyOptions(exact_batches=True, engine_sleep_level=level, offload_while_generating=True)
    strategy = SingleStrategy(0, 1.0, 1, 1, options)
    strategy.setup_distributed()
    model, tokenizer = tiny_model()
    strategy.tokenizer = tokenizer
    policy = strategy.prepare(Policy(model))
    strategy.register(policy, strategy.create_optimizer(policy))
    strategy.setup_inference_engine(None, "native", actor=policy)
    params = SamplingParams(max_new_tokens=20, n=8, seed=3, ignore_eos=True)
    found: list[list[Any]] = []
    taken = []
    for _ in range(3):
        items = strategy.gather_and_generate(params, all_prompt_token_ids=[[3, 12, 3, 13]])
        found.append([list(item.output_token_ids) for item in items])
        taken.append(torch.empty(1 << 22, device="cuda"))  # so that the next memory lies elsewhere
    assert found[0] == found[1] == found[2]
    strategy.close()


def test_replayed_steps_compute_what_launched_ones_do() -> None:
    found = []
    for kind in (NativeEngine, EagerEngine):
        model, _ = tiny_model(hidden_size=256, intermediate_size=512)
        device = torch.device("cuda")
        engine = kind(model.to(device), eos_token_ids=[2], device=device, max_num_seqs=32)
        for index in range(40):  # of different lengths, so that rows come and go
            params = SamplingParams(max_new_tokens=1 + 20 * (index % 15), n=1 + index % 3, seed=index)
            engine.submit([3, *range(4, 5 + index % 7)], params)
        done = []
        while engine.has_unfinished():
            done += engine.step()
        found.append(sorted(done, key=lambda item: (item.request_id, item.sample_index)))
        forward: Any = engine._runner._fused
        assert isinstance(forward, ReplayedForward) == (kind is NativeEngine)
        if kind is NativeEngine:
            assert forward._steps
            assert engine.sleep(2) > 0
            assert not forward._steps
    for one, other in zip(*found, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_checkpoint_keeps_the_random_numbers_of_the_gpu() -> None:
    torch.cuda.manual_seed(5)
    state = _random_state()
    wanted = torch.rand(4, device="cuda")
    torch.rand(100, device="cuda")
    _set_random_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), wanted)
