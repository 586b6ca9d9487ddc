"""vLLM and SGLang on GPUs: memory that is really freed, CUDA graphs, NCCL. They were never run on one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine_models import save_tiny_model

from lightrl.imports import is_installed
from lightrl.testing import run_program, run_spmd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_grpo.py"
FLAGS = ["--max_steps", "3", "--num_prompts", "4", "--group_size", "4", "--eval.every", "0", "--checkpoint.every", "0"]
FLAGS += ["--dtype", "bfloat16", "--canary_every", "1", "--engine_mem_fraction", "0.2"]
TIME_OUT_S = 580  # the first start compiles and captures graphs


def needs(engine: str) -> None:
    if not is_installed(engine):
        pytest.skip(f"{engine} is not installed")


def check(folder: Path) -> None:
    """Every sync is followed by a canary, which stops the run if the engine computes something else."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert max(row["sync/canary_max_abs"] for row in rows) < 0.25
    assert all(row["memory/engine_freed_gb"] > 0 for row in rows)


@pytest.mark.parametrize("family", ["tied", "experts", "qwen3_vl"])
def test_vllm_keeps_its_logprobs_over_sleeps_and_can_be_replaced(family: str, tmp_path: Path) -> None:
    needs("vllm")
    folder = save_tiny_model(family, tmp_path)
    program = ROOT / "tests" / "programs" / "vllm_sleep_program.py"
    assert "all checked" in run_program([sys.executable, str(program), "cuda", family, folder], timeout_s=TIME_OUT_S)


@pytest.mark.parametrize("level", ["1", "2"])
@pytest.mark.parametrize(
    "flags",
    ["", "--lora.rank 4 --lora.engine unmerged", "--engine_args enforce_eager=true"],
    ids=["plain", "adapters", "no graphs"],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_with_an_engine_that_sleeps(engine: str, flags: str, level: str, tmp_path: Path) -> None:
    needs(engine)
    if engine == "sglang":
        flags = flags.replace("enforce_eager", "disable_cuda_graph")
    options = ["--engine", engine, "--engine_sleep_level", level, *flags.split(), "--output_dir", str(tmp_path)]
    run_spmd(SCRIPT, *FLAGS, *options, world_size=1, timeout_s=TIME_OUT_S, torchrun=True)
    check(tmp_path)


@needs_two
@pytest.mark.parametrize("size", ["1", "2"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_ranks_with_an_engine_each_and_with_one_for_both(engine: str, size: str, tmp_path: Path) -> None:
    needs(engine)
    options = ["--engine", engine, "--engine_tp_size", size, "--engine_sleep_level", "2", "--strategy", "fsdp"]
    options += ["--output_dir", str(tmp_path)]
    run_spmd(SCRIPT, *FLAGS, *options, world_size=2, timeout_s=TIME_OUT_S, torchrun=True)
    check(tmp_path)


@needs_two
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_rank_that_only_generates_uses_its_own_gpu(engine: str, tmp_path: Path) -> None:
    """The engine of the second rank, alone in its world, must not take the first device."""
    needs(engine)
    options = ["--engine", engine, "--strategy", "single", "--rollout_ranks", "1", "--engine_mem_fraction", "0.8"]
    run_spmd(SCRIPT, *FLAGS, *options, "--output_dir", str(tmp_path), world_size=2, timeout_s=TIME_OUT_S, torchrun=True)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
