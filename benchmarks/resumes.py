"""Continues runs on the same and on other layouts of ranks, and compares them with undisturbed runs.

    python benchmarks/resumes.py
    python benchmarks/resumes.py --layouts "2 fsdp" "2 ZeRO-3"

For each layout, a run of GRPO takes 4 steps and saves after 2. Then runs with the same layout and with the next one in
the list continue from step 2. A row says by how much the final weights and the losses of the last two steps differ from
the undisturbed run; 0 means equal to the bit. The exit code is 1 if the same layout gives different bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from lightrl.testing import run_spmd

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts/train_grpo.py"
MEGATRON = ["--strategy", "lightrl_megatron_cpu:CpuMegatronStrategy", "--tp_size", "2"]  # of the folder below
SETTINGS = [
    *("--max_steps", "4", "--num_prompts", "4", "--group_size", "4", "--num_minibatches", "2", "--num_epochs", "2"),
    *("--algorithm.kl_coef", "0.01", "--checkpoint.every", "2", "--checkpoint.keep", "3", "--eval.every", "0"),
    *("--log.tensorboard", "False"),
]
LAYOUTS = {  # ranks and flags
    "1 single": (1, ["--strategy", "single"]),
    "2 ddp": (2, ["--strategy", "ddp"]),
    "2 fsdp": (2, ["--strategy", "fsdp"]),
    "3 fsdp": (3, ["--strategy", "fsdp"]),
    "2 TP": (2, ["--strategy", "fsdp", "--tp_size", "2"]),
    "4 fsdp x TP": (4, ["--strategy", "fsdp", "--tp_size", "2"]),
    "2 SP": (2, ["--strategy", "fsdp", "--sp_size", "2"]),
    "2 ZeRO-0": (2, ["--strategy", "deepspeed", "--deepspeed.zero_stage", "0"]),
    "2 ZeRO-1": (2, ["--strategy", "deepspeed", "--deepspeed.zero_stage", "1"]),
    "2 ZeRO-2": (2, ["--strategy", "deepspeed", "--deepspeed.zero_stage", "2"]),
    "2 ZeRO-3": (2, ["--strategy", "deepspeed", "--deepspeed.zero_stage", "3"]),
    "1 ZeRO-2": (1, ["--strategy", "deepspeed", "--deepspeed.zero_stage", "2"]),
    "4 Megatron TP x stages": (4, [*MEGATRON, "--megatron.pp_size", "2"]),
    "4 Megatron TP": (4, [*MEGATRON, "--megatron.sequence_parallel", "True"]),
}


def train(layout: str, folder: Path, *flags: str) -> Path:
    """Runs the program to its end; returns the folder."""
    world, spread = LAYOUTS[layout]
    settings = (*SETTINGS, *spread, *flags, "--output_dir", str(folder))
    run_spmd(SCRIPT, *settings, world_size=world, timeout_s=600, cwd=ROOT / "tests/megatron_cpu")
    return folder


def differences(folder: Path, other: Path) -> tuple[float, float]:
    """Returns the largest difference of a weight, and of a loss of the last two steps."""
    mine, theirs = (load_file(path / "final/model.safetensors") for path in (folder, other))
    weights = max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)
    losses = [[json.loads(line)["loss"] for line in (path / "metrics.jsonl").open()][-2:] for path in (folder, other)]
    return weights, max(abs(a - b) for a, b in zip(*losses, strict=True))


def main() -> None:
    """Prints a row for each layout and the one that continues it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        help="ranks with a strategy, in the order in which they continue one another (default: all)",
    )
    args = parser.parse_args()
    is_equal = True
    print("| Saved by | Continued by | Weights differ by | Losses differ by |\n|---|---|---|---|", flush=True)
    for index, layout in enumerate(args.layouts):
        with tempfile.TemporaryDirectory() as name:
            whole = train(layout, Path(name) / "whole")
            saved = str(whole / "checkpoints/step-000002")
            others = dict.fromkeys([layout, args.layouts[(index + 1) % len(args.layouts)]])
            for number, other in enumerate(others):
                weights, losses = differences(train(other, Path(name) / str(number), "--resume", saved), whole)
                is_equal &= other != layout or weights == losses == 0
                print(f"| {layout} | {other} | {weights:.1e} | {losses:.1e} |", flush=True)
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
