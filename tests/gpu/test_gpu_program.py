"""What only a GPU can show: NCCL, device memory really freed, the same run as on the CPU. Run by `make test-gpu`."""

import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch

from lightrl.builtin.model import tiny_model
from lightrl.config import StrategyOptions
from lightrl.engines.base import SamplingParams
from lightrl.models.policy import Policy
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import run_program, run_spmd, strategy_program
from lightrl.testing.tiny_training import adamw, plain_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]
ROOT = Path(__file__).parents[2]


STUCK = """
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from lightrl.comm import connect, pick_device
from lightrl.stall_watch import end_by

end_by(os._exit)
comm = connect(pick_device("cuda", 1), timedelta(seconds=5))
with comm.phase("learn"):
    ones = torch.ones(4, device=comm.device)
    dist.all_reduce(ones)
    print(ones.sum().item(), flush=True)
    torch.cuda._sleep(1 << 37)  # for a minute or more, as if another rank did not come
    dist.all_reduce(ones)
    print(ones.sum().item())
"""


def test_a_stuck_collective_is_reported_before_torch_ends_the_process(tmp_path: Path) -> None:
    program = tmp_path / "stuck.py"
    program.write_text(STUCK)
    started = time.monotonic()
    output = run_spmd(program, world_size=1, timeout_s=100, expect_failure=True)
    assert "rank 0 waited for its GPU in phase 'learn': NCCL gave up a collective (TIMEOUT)" in output
    assert time.monotonic() - started < 60


def single_on_gpu() -> SingleStrategy:
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True))
    strategy.setup_distributed()
    assert strategy.device.type == "cuda"
    return strategy


def test_nccl_training_equals_plain_training(tmp_path: Path) -> None:
    world = min(2, torch.cuda.device_count())
    flags = ["--only_parity", "--strategy", "fsdp"]
    run_spmd(str(strategy_program.__file__), str(tmp_path), *flags, world_size=world, timeout_s=280)
    results = json.loads((tmp_path / "report.json").read_text())
    losses, norms, _ = plain_training(adamw, 1.0)
    for variant in ("all at once", "micro-batches of 1", "a rank without samples"):
        assert results[f"trained {variant}"]["losses"] == pytest.approx(losses, abs=1e-4)
        assert results[f"trained {variant}"]["norms"] == pytest.approx(norms, rel=1e-3)


def test_a_run_on_the_gpu_starts_as_on_the_cpu(tmp_path: Path) -> None:
    flags = ["--max_steps", "2", "--checkpoint.every", "0", "--eval.every", "0"]
    rows = {}
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        command = [sys.executable, str(ROOT / "scripts" / "train_grpo.py"), *flags, "--output_dir", str(folder)]
        run_program([*command, "--distributed.device", device], timeout_s=280)
        rows[device] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = {device: found[0] for device, found in rows.items()}
    assert first["cuda"]["reward/mean"] == pytest.approx(first["cpu"]["reward/mean"], abs=0.02)
    assert first["cuda"]["mismatch/max_abs"] < 1e-3
    assert math.isfinite(first["cuda"]["grad_norm"])
    assert first["cuda"]["memory/device_gb"] > 0


def test_a_deterministic_run_on_the_gpu_repeats_to_the_bit(tmp_path: Path) -> None:
    flags = ["--max_steps", "2", "--checkpoint.every", "0", "--eval.every", "0", "--distributed.deterministic", "True"]
    lines = []
    for name in ("one", "other"):
        command = [sys.executable, str(ROOT / "scripts" / "train_grpo.py"), *flags, "--top_p", "0.9"]
        run_program([*command, "--output_dir", str(tmp_path / name)], timeout_s=280)
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        lines.append([{key: json.loads(row)[key] for key in ("loss", "grad_norm", "reward/mean")} for row in rows])
    assert lines[0] == lines[1]


def test_sleep_gives_the_cache_back_to_the_device() -> None:
    strategy = single_on_gpu()
    model, tokenizer = tiny_model()
    strategy.tokenizer = tokenizer
    policy = strategy.prepare(Policy(model))
    strategy.setup_inference_engine(None, "native", actor=policy)
    params = SamplingParams(max_new_tokens=100, n=64, ignore_eos=True)
    strategy.gather_and_generate(params, all_prompt_token_ids=[[3, 12, 3, 13]])  # libraries keep their work space
    before = torch.cuda.memory_allocated()
    strategy.gather_and_generate(params, all_prompt_token_ids=[[3, 12, 3, 13]], sleep_engine=False)
    awake = torch.cuda.memory_allocated()
    assert strategy.engine is not None
    freed = strategy.engine.sleep()
    assert freed > 0
    assert awake - torch.cuda.memory_allocated() >= freed
    assert torch.cuda.memory_allocated() - before < freed / 10
    strategy.close()


def test_offload_frees_the_shards() -> None:
    strategy = single_on_gpu()
    model, _ = tiny_model(hidden_size=512, intermediate_size=2048)
    policy = strategy.prepare(Policy(model))
    optimizer = strategy.create_optimizer(policy)
    strategy.register(policy, optimizer)
    for _ in range(2):  # the second leaves gradients beside the moments
        for parameter in policy.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    values = {name: parameter.detach().clone().cpu() for name, parameter in policy.named_parameters()}
    shards = sum(parameter.nbytes for parameter in policy.parameters())
    before = torch.cuda.memory_allocated()
    reported = strategy.offload_param_and_grad(offload_grad=True) + strategy.offload_optimizer()
    freed = before - torch.cuda.memory_allocated()
    assert freed == pytest.approx(4 * shards, rel=0.05)  # weights, gradients and two moments
    assert reported == pytest.approx(freed, rel=0.05)
    loaded = strategy.load_param_and_grad(load_grad=True) + strategy.load_optimizer()
    assert loaded == reported
    assert torch.cuda.memory_allocated() == pytest.approx(before, rel=0.05)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter.detach().cpu(), values[name]), name
        assert bool((parameter.grad == 0.5).all()), name
    strategy.close()


def test_the_trainer_leaves_the_device_while_the_engine_is_awake() -> None:
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True, offload_while_generating=True))
    strategy.setup_distributed()
    model, tokenizer = tiny_model(hidden_size=512, intermediate_size=2048)
    strategy.tokenizer = tokenizer
    policy = strategy.prepare(Policy(model))
    strategy.register(policy, strategy.create_optimizer(policy))
    strategy.setup_inference_engine(None, "native", actor=policy)
    strategy.maybe_sleep_inference_engine()
    shards = sum(parameter.nbytes for parameter in policy.parameters())
    asleep = torch.cuda.memory_allocated()
    params = SamplingParams(max_new_tokens=2, n=2, ignore_eos=True)
    strategy.gather_and_generate(params, all_prompt_token_ids=[[3, 12, 3, 13]])
    assert strategy.residency.offloaded_bytes == pytest.approx(shards, rel=0.05)
    assert torch.cuda.memory_allocated() == pytest.approx(asleep, rel=0.05)
    strategy.close()
