"""Separate ranks on GPUs: the link over NCCL, and the numbers of a run whose ranks do both."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.testing import run_program, run_spmd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]
SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
FLAGS = ["--num_prompts", "4", "--group_size", "4", "--checkpoint.every", "0", "--eval.every", "0"]
FLAGS += ["--strategy", "single", "--max_steps", "4"]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def split_run(folder: Path, *flags: str) -> list[dict[str, Any]]:
    run_spmd(SCRIPT, *FLAGS, *flags, "--rollout_ranks", "1", "--output_dir", str(folder), world_size=2, timeout_s=280)
    return rows(folder)


@needs_two
def test_separate_ranks_on_two_gpus_have_the_numbers_of_one(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *FLAGS, "--output_dir", str(tmp_path / "together")]
    run_program(command, timeout_s=280)
    found = split_run(tmp_path / "apart")
    for mine, wanted in zip(found, rows(tmp_path / "together"), strict=True):
        assert mine["reward/mean"] == pytest.approx(wanted["reward/mean"], abs=0.02)
        assert mine["loss"] == pytest.approx(wanted["loss"], abs=1e-3)
        assert mine["mismatch/max_abs"] < 1e-3


@needs_two
def test_generation_goes_on_while_two_gpus_learn_and_take_weights(tmp_path: Path) -> None:
    found = split_run(tmp_path / "bounded", "--rollout.max_staleness", "1")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert max(row["rollout/staleness_max"] for row in found) <= 1


@needs_two
def test_weights_travel_over_nccl(tmp_path: Path) -> None:
    program = tmp_path / "link.py"
    program.write_text(
        """
from datetime import timedelta

import torch

from lightrl.comm import connect, pick_device
from lightrl.engines.link import Link
from lightrl.roles import split

role = split(1)
device = pick_device("cuda", 2)
connect(device, timedelta(seconds=60))
link = Link(role, device, timedelta(seconds=60))
link.meet()
weights = {"matrix": torch.arange(4096.0, device=device).reshape(64, 64), "half": torch.ones(3).half().to(device)}
if role.is_trainer:
    link.send_weights(weights.items(), None, 8192)
else:
    received = {name: tensor.clone() for name, tensor in link.receive_weights()[1]}
    assert all(tensor.device == device and torch.equal(tensor, weights[name]) for name, tensor in received.items())
    assert list(received) == list(weights)
assert type(link._data).__name__ == "ProcessGroupNCCL"
link.peers.end()
print(f"{role.name} done", flush=True)
"""
    )
    said = run_spmd(program, world_size=2, timeout_s=120)
    assert "trainer done" in said
    assert "rollout done" in said


def test_two_ranks_without_two_gpus_are_refused(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("needs exactly one CUDA device")
    flags = [*FLAGS, "--rollout_ranks", "1", "--output_dir", str(tmp_path / "run")]
    said = run_spmd(SCRIPT, *flags, world_size=2, timeout_s=280, expect_failure=True)
    assert "Local rank 1 has no GPU: 1 usable here" in said
