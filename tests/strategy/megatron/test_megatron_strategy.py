"""Megatron on two CPU ranks equals plain training; docs/megatron.md has the figures of all layouts.

megatron-core wants a GPU: tests/megatron_cpu replaces what it calls, in the processes of the ranks alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lightrl.checkpoint import resolve_checkpoint
from lightrl.strategy.saving.state_reader import TensorReader
from lightrl.testing import StrategyContract, run_spmd

pytest.importorskip("megatron.core", reason="needs lightrl[megatron]")
pytestmark = [pytest.mark.slow, pytest.mark.engine]

CPU = "lightrl_megatron_cpu:CpuMegatronStrategy"
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "megatron_cpu"


class TestPipeline(StrategyContract):
    strategy = CPU
    cwd = FOLDER
    flags = ("--megatron.pp_size", "2")
    world_sizes = (2,)
    variants = ("a rank without samples", "sgd without clipping")
    runs_by_calls = False


def run_of_grpo(folder: Path, *flags: str) -> tuple[list[dict[str, float]], bytes]:
    """Returns the metrics that do not depend on the clock, and the final weights."""
    layout = ["--strategy", CPU, "--tp_size", "2", "--megatron.pp_size", "2"]
    settings = "--max_steps 4 --num_prompts 8 --group_size 4 --eval.every 0 --checkpoint.every 2 --checkpoint.keep 3"
    settings += " --algorithm.kl_coef 0.1 --reference.sync_every 1 --reference.mixup 0.5"
    arguments = [*layout, *settings.split(), *flags, "--log.tensorboard", "False", "--output_dir", str(folder)]
    run_spmd(ROOT / "scripts" / "train_grpo.py", *arguments, world_size=4, timeout_s=200, cwd=FOLDER)
    names = ("step", "loss", "kl", "grad_norm", "entropy", "reward/mean", "mismatch/mean_abs", "sync/version")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in names} for row in rows], (folder / "final/model.safetensors").read_bytes()


def test_a_run_of_tensors_x_stages_goes_on_where_it_was_stopped(tmp_path) -> None:
    """docs/megatron.md has three layouts of four ranks, 40 steps each, that also learn."""
    steps, weights = run_of_grpo(tmp_path / "whole")
    saved = tmp_path / "whole" / "checkpoints" / "step-000002"
    assert run_of_grpo(tmp_path / "resumed", "--resume", str(saved)) == (steps[2:], weights)
    moved = [step["grad_norm"] > 0 for step in steps]  # False where the samples of every group have equal rewards
    assert any(moved[:2])
    assert any(moved[2:])


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = resolve_checkpoint(folder, None)
    assert path is not None
    readers = {kind: TensorReader(path, kind) for kind in ("model", "optimizer", "ema")}
    return {f"{kind} {name}": reader[name] for kind, reader in readers.items() for name in sorted(reader.names)}


def mean_difference(first: Path, second: Path) -> float:
    """Returns the mean distance between two numbers of the weights in two checkpoints."""
    one, two = saved_tensors(first), saved_tensors(second)
    apart = [(one[key] - two[key]).abs().reshape(-1) for key in one if key.startswith("model ")]
    return float(torch.cat(apart).mean())


def run_legs(folder: Path, world: int, *legs: str) -> None:
    program = ROOT / "benchmarks" / "megatron_grid_program.py"
    run_spmd(program, str(folder), *legs, world_size=world, timeout_s=200, cwd=FOLDER)


def test_bfloat16_keeps_what_the_contract_asks() -> None:
    """bfloat16_ranks.py says what; the distributed optimizer and tensors pass it too (docs/megatron.md)."""
    flags = ["--strategy", CPU, "--dtype", "bfloat16", "--megatron.pp_size", "2"]
    run_spmd(FOLDER / "bfloat16_ranks.py", *flags, world_size=2, timeout_s=200, cwd=FOLDER)


@pytest.mark.parametrize(
    "layout",
    [
        "dense --tp_size 2 --megatron.sequence_parallel True",
        "dense --megatron.cp_size 2",
        "experts --megatron.ep_size 2",
    ],
)
def test_a_layer_keeps_for_its_backward_what_the_plan_says(layout) -> None:
    """kept_ranks.py compares the bytes."""
    family, *flags = layout.split()
    run_spmd(FOLDER / "kept_ranks.py", family, "--strategy", CPU, *flags, world_size=2, timeout_s=200, cwd=FOLDER)


def test_dictionaries_of_rows_and_steps_of_a_schedule_equal_plain_training(tmp_path) -> None:
    """Stages, and tensors with sequence parallelism, against one rank of `single`."""
    layouts = {
        "single": "--strategy single",
        "stages": f"--strategy {CPU} --megatron.pp_size 2",
        "tensors": f"--strategy {CPU} --tp_size 2 --megatron.sequence_parallel True",
    }
    found = {}
    for name, flags in layouts.items():
        path, world = tmp_path / f"{name}.json", 1 if name == "single" else 2
        run_spmd(FOLDER / "rows_ranks.py", str(path), *flags.split(), world_size=world, timeout_s=200, cwd=FOLDER)
        found[name] = json.loads(path.read_text())
    for name in ("stages", "tensors"):
        for part in ("train", "eval", "scores", "steps"):
            assert_close(torch.tensor(found[name][part]), torch.tensor(found["single"][part]), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "of_steps", "of_logprobs"), [("float32", (1e-6, 1e-5), 1e-5), ("bfloat16", (0.0, 5e-3), 1e-2)]
)
def test_stages_of_chunks_with_as_many_micro_batches_as_stages(
    dtype: str, of_steps: tuple[float, float], of_logprobs: float, tmp_path: Path
) -> None:
    """One stage then runs all forwards first, while the next one sends a gradient to it and receives from it.

    bfloat16 has 8 bits: its losses and norms on one rank differ from those of float32 by up to 2e-3.
    """
    chunks = f"--strategy {CPU} --megatron.pp_size 4 --megatron.vpp_size 2"
    found = []
    for name, world, layout in (("single", 1, "--strategy single"), ("chunks", 4, chunks)):
        flags = [str(tmp_path / f"{name}.json"), *layout.split(), "--dtype", dtype]
        run_spmd(FOLDER / "chunks_ranks.py", *flags, world_size=world, timeout_s=200, cwd=FOLDER)
        found.append(json.loads((tmp_path / f"{name}.json").read_text()))
    single, staged = found
    assert_close(torch.tensor(staged["steps"]), torch.tensor(single["steps"]), atol=of_steps[0], rtol=of_steps[1])
    for one, other in zip(staged["logprobs"], single["logprobs"], strict=True):
        assert_close(torch.tensor(one), torch.tensor(other), atol=of_logprobs, rtol=0)


def test_checkpoints_that_move_between_strategies_and_a_reward_model(tmp_path) -> None:
    """A sample of benchmarks/megatron_grid.py, which moves those of every family; and a training split by tensors.

    The reward model's padding token is among the samples: its embedding must take no gradient, as in transformers.
    """
    run_legs(
        tmp_path,
        2,
        f"qwen3 first: --strategy {CPU} --megatron.pp_size 2",
        "qwen3 sharded <- first: --strategy fsdp",
        f"qwen3 last <- sharded: --strategy {CPU} --tp_size 2 --megatron.sequence_parallel True",
        f"qwen3 rounded <- sharded: --strategy {CPU} --tp_size 2 --megatron.sequence_parallel True --dtype bfloat16",
        f"qwen3 rounded_stages <- rounded: --strategy {CPU} --megatron.pp_size 2 --dtype bfloat16",
        f"deepseek_v3_groups latent: --strategy {CPU} --megatron.pp_size 2",
        f"deepseek_v3_groups latent_experts <- latent: --strategy {CPU} --megatron.ep_size 2",
        f"reward rounded_scores: --strategy {CPU} --megatron.pp_size 2 --dtype bfloat16",
        f"reward tensors: --strategy {CPU} --tp_size 2 --megatron.sequence_parallel True",
    )
    run_legs(
        tmp_path,
        1,
        "qwen3 alone <- last: --strategy single",
        "reward alone_too: --strategy single",
        "deepseek_v3_groups latent_alone <- latent_experts: --strategy single",
        "qwen3 rounded_alone <- rounded_stages: --strategy single --dtype bfloat16",
        "reward rounded_scores_alone: --strategy single --dtype bfloat16",
    )
    reports = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}

    wanted = saved_tensors(tmp_path / "first")
    assert {name.split()[0] for name in wanted} == {"model", "optimizer", "ema"}
    assert any(bool(tensor.any()) for name, tensor in wanted.items() if name.endswith("/exp_avg_sq"))
    for name in ("sharded", "last", "alone", "rounded", "rounded_stages", "rounded_alone"):
        found = saved_tensors(tmp_path / name)
        assert sorted(found) == sorted(wanted)
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), (name, key)
        if not name.startswith("rounded"):
            assert_close(reports[name]["next"], reports["first"]["next"], atol=1e-6, rtol=1e-5)

    wanted = saved_tensors(tmp_path / "latent")
    assert sum("e_score_correction_bias" in name for name in wanted if name.startswith("model ")) == 3
    for name in ("latent_experts", "latent_alone"):
        found = saved_tensors(tmp_path / name)
        assert sorted(found) == sorted(wanted)
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items()), name
        assert_close(reports[name]["next"], reports["latent"]["next"], atol=1e-6, rtol=1e-5)

    for name in ("rounded", "rounded_stages"):  # bfloat16 has 8 bits: 4e-3 of each number
        assert_close(reports[name]["next"], reports["rounded_alone"]["next"], atol=1e-3, rtol=3e-2)
    assert_close(reports["rounded_scores"]["next"], reports["rounded_scores_alone"]["next"], atol=1e-3, rtol=3e-2)
    # Two steps of AdamW at a rate of 1e-3 move a weight by up to 2e-3; rounding turns those of tiny gradients around.
    assert mean_difference(tmp_path / "rounded_scores", tmp_path / "rounded_scores_alone") < 2e-4

    for name in ("first", "tensors", "alone_too"):  # the average of the weights, by hand from the weights
        assert reports[name]["average"] < 1e-7
    assert_close(reports["tensors"]["next"], reports["alone_too"]["next"], atol=1e-6, rtol=1e-5)
    found, wanted = saved_tensors(tmp_path / "tensors"), saved_tensors(tmp_path / "alone_too")
    assert sorted(found) == sorted(wanted)
    for key in (key for key in wanted if key.startswith("model ")):
        assert_close(found[key], wanted[key], atol=1e-4, rtol=0, msg=key)  # AdamW: a gradient of 1e-9 is a step of lr
