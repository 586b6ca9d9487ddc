"""The whole program with --lora.*: one run however it is spread, the reference, the export, and a start from it."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightrl.testing import run_program, run_spmd
from lightrl.trainers import hash_run

peft = pytest.importorskip("peft")

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
FLAGS = [
    *("--algorithm.kl_coef", "0.1", "--num_minibatches", "2", "--canary_every", "1", "--lr", "1e-2"),
    *("--checkpoint.every", "2", "--max_steps", "4"),
]
COMPARED = ("loss", "grad_norm", "entropy", "kl", "reward/mean", "tokens/response")
ReadMetrics = Callable[[Path], list[dict[str, Any]]]


def run(folder: Path, *flags: str) -> str:
    command = [sys.executable, str(SCRIPT), *flags, "--output_dir", str(folder)]
    return run_program(command, timeout_s=240)


@pytest.fixture(scope="module")
def trained(toy_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    run(folder, *toy_flags, *FLAGS, "--lora.rank", "4")
    return folder


def test_adapters_learn_and_the_engine_follows(trained: Path, metrics_of: ReadMetrics) -> None:
    rows = metrics_of(trained)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["kl"] < rows[-1]["kl"]  # to the model without adapters, which the first update starts from
    assert all(row["mismatch/max_abs"] < 1e-5 for row in rows)
    assert all(row["sync/canary_max_abs"] < 1e-4 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


def test_the_export_is_the_merged_model_and_the_adapter(trained: Path, toy: Path) -> None:
    merged: Any = AutoModelForCausalLM.from_pretrained(trained / "final")
    base: Any = AutoModelForCausalLM.from_pretrained(toy / "model")
    ids = torch.tensor([[3, 4, 5, 6]])
    plain = base(ids).logits
    adapted = peft.PeftModel.from_pretrained(base, str(trained / "final" / "adapter"))
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=0)
    assert (plain - merged(ids).logits).abs().max() > 1e-3
    config = json.loads((trained / "final" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(toy / "model")
    names = [name for path in (trained / "checkpoints").glob("step-*/model-*.safetensors") for name in load_file(path)]
    assert names
    assert all(".lora_" in name for name in names)
    assert hash_run.main([str(trained)]) == 0
    assert (trained / "final" / "adapter" / "weights.sha256").is_file()


def test_a_run_starts_from_an_adapter(
    trained: Path, toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    adapter = trained / "final" / "adapter"
    told = run(tmp_path / "run", *toy_flags, *FLAGS, "--lora.path", str(adapter), "--max_steps", "1", "--lr", "0")
    assert "The reference is the model without the adapter of --lora.path." in told
    first, *_ = metrics_of(tmp_path / "run")
    assert first["kl"] > 1e-4  # of the adapter against the model without it
    assert first["mismatch/max_abs"] < 1e-5
    written, read = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path / "run/final/adapter", adapter)
    )
    assert sorted(written) == sorted(read)
    assert all(torch.equal(written[name], read[name]) for name in read)


@pytest.mark.slow
def test_two_ranks_and_a_resumed_run_are_the_same(
    trained: Path, toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    flags = [*toy_flags, *FLAGS, "--lora.rank", "4", "--output_dir", str(tmp_path / "run")]
    run_spmd(SCRIPT, *flags, "--strategy", "fsdp", world_size=2, timeout_s=240)
    check_alike(metrics_of(trained), metrics_of(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    assert "continuing after step 2" in run_spmd(SCRIPT, *flags, "--strategy", "ddp", world_size=2, timeout_s=240)
    check_alike(metrics_of(trained), metrics_of(tmp_path / "run"))


@pytest.mark.slow
def test_tokens_split_over_ranks(trained: Path, toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path) -> None:
    flags = [*toy_flags, *FLAGS, "--lora.rank", "4", "--output_dir", str(tmp_path / "run")]
    run_spmd(SCRIPT, *flags, "--strategy", "fsdp", "--sp_size", "2", world_size=2, timeout_s=240)
    check_alike(metrics_of(trained), metrics_of(tmp_path / "run"))


def check_alike(wanted: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for mine, yours in zip(wanted, found, strict=True):
        for name in COMPARED:
            assert math.isclose(mine[name], yours[name], rel_tol=1e-4, abs_tol=1e-6), (name, mine[name], yours[name])
