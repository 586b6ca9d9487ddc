"""On two ranks: one engine for both, and one for each in a real run."""

import json
from pathlib import Path

import pytest

from lightrl.testing import run_spmd

TESTS = Path(__file__).resolve().parents[2]
PROGRAMS = TESTS / "programs"


def test_two_ranks_share_an_engine():
    output = run_spmd(PROGRAMS / "sglang_program.py", world_size=2, timeout_s=200, torchrun=True)
    assert output.count("all checked") == 2


@pytest.mark.parametrize("engine_tp_size", [1, 2])
def test_two_ranks_hold_the_adapters_of_users(engine_tp_size):
    """An engine on each rank, and one with two schedulers for both."""
    pytest.importorskip("peft")
    program = PROGRAMS / "sglang_adapters_program.py"
    output = run_spmd(program, str(engine_tp_size), world_size=2, timeout_s=220, torchrun=True)
    assert output.count("all checked") == 2


def first_steps(folder, *flags, cwd=None):
    """Runs three steps of GRPO, syncs with canaries; returns the metrics of each."""
    arguments = ["--engine", "sglang", "--max_steps", "3", "--output_dir", str(folder / "run"), "--canary_every", "1"]
    arguments += ["--num_prompts", "4", "--group_size", "4", "--temperature", "0.7", "--eval.max_prompts", "8"]
    program = PROGRAMS / "fast_grpo_program.py"
    run_spmd(program, *flags, *arguments, world_size=2, timeout_s=220, torchrun=True, cwd=cwd)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "mismatch/max_abs" in row]


def test_grpo_with_an_engine_on_each_rank(tmp_path):
    steps = first_steps(tmp_path, "--strategy", "fsdp")
    assert len(steps) == 3
    assert max(step["mismatch/max_abs"] for step in steps) < 2e-5


@pytest.mark.parametrize("flags", ["", "--engine_tp_size 2"])
def test_grpo_with_adapters_beside_the_weights(tmp_path, flags):
    adapters = ["--lora.rank", "4", "--lora.engine", "unmerged", *flags.split()]
    steps = first_steps(tmp_path, "--strategy", "fsdp", *adapters)
    assert len(steps) == 3
    assert max(step["mismatch/max_abs"] for step in steps) < 2e-5


@pytest.mark.parametrize("layout", ["--tp_size 2 --megatron.sequence_parallel True", "--megatron.pp_size 2"])
def test_megatron_with_an_engine_on_each_rank(tmp_path, layout):
    pytest.importorskip("megatron.core", reason="needs lightrl[megatron]")
    strategy = ["--strategy", "lightrl_megatron_cpu:CpuMegatronStrategy"]
    steps = first_steps(tmp_path, *strategy, *layout.split(), cwd=TESTS / "megatron_cpu")
    assert len(steps) == 3
    assert max(step["mismatch/max_abs"] for step in steps) < 1e-4  # another weight is above 1e-2
    assert max(step["sync/canary_max_abs"] for step in steps) < 1e-4
    assert any(step["grad_norm"] > 0 for step in steps)  # the samples of a group may have equal rewards
