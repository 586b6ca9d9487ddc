"""Moves checkpoints between Megatron and other layouts, and runs GRPO with Megatron and vLLM, on CPU ranks.

    python benchmarks/megatron_grid.py checkpoints [--families qwen3 mixtral]
    python benchmarks/megatron_grid.py engines [--engine vllm] [--steps 3]

checkpoints: trains each family for two steps in a first layout of Megatron and saves; then fsdp on two ranks, single,
and a second layout of Megatron read and save the checkpoint one after another. A row says whether every tensor of a leg
(weights, moments, the average of the weights) has the same bits as in the first leg, and by how much the next two steps
differ. engines: the first steps of GRPO on the built-in task, and the difference between engine and trainer logprobs.
The exit code is 1 if a bit or a logprob is wrong. megatron-core runs as in the tests, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightrl.checkpoint import resolve_checkpoint
from lightrl.strategy.saving.state_reader import TensorReader
from lightrl.testing import run_spmd

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "megatron_cpu"
CPU = "--strategy lightrl_megatron_cpu:CpuMegatronStrategy"
MISMATCH = 3e-5  # of the logprob of a token in the first steps, float32 on both sides; the mean is below a tenth
_SEQUENCE = "--megatron.sequence_parallel True"
_SHARDED = "--megatron.distributed_optimizer True"


class Layout(NamedTuple):
    """How many ranks, and the flags of each."""

    world: int
    flags: str


LAYOUTS = {  # the first layout of a family and the last
    "qwen3": (
        Layout(4, "--tp_size 2 --megatron.pp_size 2"),
        Layout(2, f"--tp_size 2 {_SEQUENCE}"),
    ),
    "qwen3_moe": (
        Layout(4, f"--megatron.ep_size 2 --tp_size 2 {_SEQUENCE} {_SHARDED}"),
        Layout(4, "--megatron.ep_size 2 --megatron.pp_size 2"),
    ),
    "mixtral": (
        Layout(4, "--megatron.ep_size 2 --megatron.pp_size 2"),
        Layout(2, f"--megatron.ep_size 2 {_SHARDED}"),
    ),
    "llama": (
        Layout(4, f"--tp_size 2 --megatron.pp_size 2 {_SEQUENCE}"),
        Layout(4, "--megatron.cp_size 2 --megatron.pp_size 2"),
    ),
    "qwen2": (
        Layout(4, f"--tp_size 2 {_SHARDED}"),
        Layout(4, f"--tp_size 2 --megatron.cp_size 2 {_SEQUENCE} {_SHARDED}"),
    ),
    "mistral": (
        Layout(4, "--megatron.pp_size 4"),
        Layout(2, "--tp_size 2"),
    ),
    "reward": (
        Layout(2, "--megatron.pp_size 2"),
        Layout(2, f"--tp_size 2 {_SEQUENCE}"),
    ),
}
ENGINE_LAYOUTS = (f"--tp_size 2 {_SEQUENCE}", "--megatron.pp_size 2", f"--megatron.cp_size 2 {_SHARDED}")


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns every tensor of the newest checkpoint of a folder."""
    found = resolve_checkpoint(folder, None)
    assert found is not None, folder
    readers = {kind: TensorReader(found, kind) for kind in ("model", "optimizer", "ema")}
    return {f"{kind} {name}": reader[name] for kind, reader in readers.items() for name in sorted(reader.names)}


def same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Returns whether both have the same names, types and values."""
    return sorted(found) == sorted(wanted) and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in wanted.items()
    )


def run_legs(folder: Path, world: int, *legs: str) -> None:
    """Runs legs in one start of ranks."""
    program = Path(__file__).with_name("megatron_grid_program.py")
    run_spmd(program, str(folder), *legs, world_size=world, timeout_s=300, cwd=FOLDER)


def move(family: str) -> bool:
    """Prints how a family's checkpoint moves; returns whether every bit arrived."""
    first, last = LAYOUTS[family]
    arrived = True
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        legs = (
            ("first", first.world, f"first: {CPU} {first.flags}"),
            ("sharded", 2, "sharded <- first: --strategy fsdp"),
            ("alone", 1, "alone <- sharded: --strategy single"),
            ("last", last.world, f"last <- alone: {CPU} {last.flags}"),
        )
        for name, world, leg in legs:
            run_legs(folder, world, f"{family} {leg}")
            report = json.loads((folder / f"{name}.json").read_text())
            found = saved_tensors(folder / name)
            if name == "first":
                wanted, steps = found, report["next"]
                print(f"{family}: {first.flags}: {len(found)} tensors; average off by {report['average']:.1g}")
                continue
            equal = same_bits(found, wanted)
            arrived &= equal
            loss = max(abs(mine[0] - theirs[0]) for mine, theirs in zip(report["next"], steps, strict=True))
            norm = max(abs(mine[1] / theirs[1] - 1) for mine, theirs in zip(report["next"], steps, strict=True))
            shown = leg.partition(":")[2].replace(CPU, "").strip()
            print(f"  {shown:<70} same bits: {equal}; next steps: loss {loss:.1e}, norm {norm:.1e}", flush=True)
    return arrived


def serve(engine: str, steps: int) -> bool:
    """Prints how far engine and trainer are apart in each layout; returns whether they are close."""
    close = True
    for flags in ENGINE_LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            options = f"--engine {engine} --max_steps {steps} --eval.every 0 --checkpoint.every 0 --canary_every 1"
            run_spmd(
                ROOT / "scripts" / "train_grpo.py",
                *f"{CPU} {flags} {options} --log.tensorboard False --output_dir {folder}".split(),
                world_size=2,
                timeout_s=600,
                cwd=FOLDER,
            )
            rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        apart, mean, canary = (
            max(row[name] for row in rows if name in row)
            for name in ("mismatch/max_abs", "mismatch/mean_abs", "sync/canary_max_abs")
        )
        close &= apart <= MISMATCH and mean <= MISMATCH / 10
        print(
            f"{engine}, {flags}: {len(rows)} steps; token {apart:.1e}, mean {mean:.1e}, canary {canary:.1e}", flush=True
        )
    return close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["checkpoints", "engines"], help="what to repeat")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=[*LAYOUTS],
        default=[*LAYOUTS],
        help="families of models, for checkpoints (default: all)",
    )
    parser.add_argument("--engine", default="vllm", help="engine, for engines (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a run, for engines (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.what == "checkpoints":
        arrived = [move(family) for family in chosen.families]
        good = all(arrived)
    else:
        good = serve(chosen.engine, chosen.steps)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
