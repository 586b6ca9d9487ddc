"""Routers that use an engine's experts, on two CPU ranks: as one process does, and in a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.testing import assert_close
from upcycled_moe import write_upcycled

from lightrl.testing import run_spmd

pytest.importorskip("megatron.core", reason="needs lightrl[megatron]")
pytestmark = [pytest.mark.slow, pytest.mark.engine]

CPU = "--strategy lightrl_megatron_cpu:CpuMegatronStrategy"
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "megatron_cpu"


def test_layouts_that_replay_random_experts_equal_one_process(tmp_path) -> None:
    """With the routers' own experts the losses are 2e-4 away from these."""
    program, split = ROOT / "benchmarks" / "megatron_grid_program.py", "--tp_size 2 --megatron.sequence_parallel True"
    layouts = {
        "experts": "--megatron.ep_size 2 --megatron.recompute full",
        "tensors": f"{split} --megatron.ep_size 2",
        "context": "--megatron.cp_size 2",
        "stages": "--megatron.pp_size 2",
    }
    legs = [f"replayed {name}: {CPU} {flags}" for name, flags in layouts.items()]
    run_spmd(program, str(tmp_path), *legs, world_size=2, timeout_s=200, cwd=FOLDER)
    run_spmd(program, str(tmp_path), "replayed alone: --strategy single", world_size=1, timeout_s=100)
    steps = {path.stem: json.loads(path.read_text())["next"] for path in tmp_path.glob("*.json")}
    assert {*steps} == {*layouts, "alone"}
    for name in layouts:
        for (loss, norm, *counts), (wanted, wanted_norm, *wanted_counts) in zip(
            steps[name], steps["alone"], strict=True
        ):
            assert_close(loss, wanted, atol=2e-6, rtol=0, msg=name)
            assert_close(norm, wanted_norm, atol=0, rtol=1e-5, msg=name)
            if name in ("tensors", "context"):  # each rank counts its own tokens; with stages, the last one its layers
                assert counts == wanted_counts
            assert min(counts) > 0


def test_a_run_whose_routers_round_apart_has_no_mismatch(tmp_path) -> None:
    """Trainer and engine would choose other experts for one token in a hundred; without replay that is 1e-3 and up."""

    model = write_upcycled(tmp_path / "model", noise=0.005, near_ties=True)
    flags = f"{CPU} --megatron.ep_size 2 --routing.replay True --model {model} --lr 1e-7 --num_prompts 16 --max_steps 2"
    options = f"--eval.every 0 --checkpoint.every 0 --log.tensorboard False --output_dir {tmp_path / 'run'}"
    program = ROOT / "scripts" / "train_grpo.py"
    run_spmd(program, *f"{flags} {options}".split(), world_size=2, timeout_s=200, cwd=FOLDER)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert max(row["routing/choices_differ"] for row in rows) > 0
    assert max(row["mismatch/max_abs"] for row in rows) < 1e-4
