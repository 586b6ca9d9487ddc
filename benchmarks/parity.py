"""Prints the largest differences of every strategy from one plain PyTorch process after 20 steps in float32.

    python benchmarks/parity.py [--world 2] [--steps 20]

Prints the table of docs/strategies.md. Two trainings of a tiny tied model on sequences of uneven lengths: AdamW with
clipping, and SGD without, which hides no error of scale.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from lightrl.testing import run_spmd, strategy_program
from lightrl.testing.strategy_parity import VARIANTS
from lightrl.testing.tiny_training import Trained, plain_training

ROOT = Path(__file__).resolve().parents[1]
ADAMW, SGD = "micro-batches of 4", "sgd without clipping"
ZERO3 = ["--deepspeed.zero_stage", "3", "--deepspeed.param_persistence_threshold", "0"]
STRATEGIES = {
    "single": ["--strategy", "single"],
    "ddp": ["--strategy", "ddp"],
    "fsdp": ["--strategy", "fsdp"],
    "fsdp, kept after forward": ["--strategy", "fsdp", "--fsdp.reshard_after_forward", "False"],
    "fsdp, --tp_size 2": ["--strategy", "fsdp", "--tp_size", "2"],
    "fsdp, --sp_size 2": ["--strategy", "fsdp", "--sp_size", "2"],
    "deepspeed, ZeRO-0": ["--strategy", "deepspeed", "--deepspeed.zero_stage", "0"],
    "deepspeed, ZeRO-1": ["--strategy", "deepspeed", "--deepspeed.zero_stage", "1"],
    "deepspeed, ZeRO-2": ["--strategy", "deepspeed", "--deepspeed.zero_stage", "2"],
    "deepspeed, ZeRO-3": ["--strategy", "deepspeed", *ZERO3],
    "deepspeed, ZeRO-3, all in host memory": [
        "--strategy", "deepspeed", *ZERO3,
        "--deepspeed.offload_optimizer", "True", "--deepspeed.offload_param", "True",
    ],
    "examples.custom_strategy": ["--strategy", "examples.custom_strategy:ReplicatedStrategy"],
}  # fmt: skip


def trained_by(flags: list[str], world: int, steps: int) -> dict[str, Trained]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [name, "--only_parity", "--steps", str(steps), "--variants", ADAMW, SGD, *flags]
        run_spmd(str(strategy_program.__file__), *arguments, world_size=world, timeout_s=600, cwd=ROOT)
        report = json.loads((folder / "report.json").read_text())
        return {variant: _read(folder, report, variant) for variant in (ADAMW, SGD)}


def _read(folder: Path, report: dict[str, dict[str, list[float]]], variant: str) -> Trained:
    parameters = torch.load(folder / f"variant{list(VARIANTS).index(variant)}.pt", weights_only=True)
    return Trained(parameters=parameters, **report[f"trained {variant}"])


def differences(found: Trained, wanted: Trained) -> tuple[float, float, float]:
    losses = max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True))
    norms = max(abs(a - b) for a, b in zip(found.norms, wanted.norms, strict=True))
    parameters = max(float((found.parameters[name] - value).abs().max()) for name, value in wanted.parameters.items())
    return losses, norms, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--world", type=int, default=2, help="ranks of every strategy but single (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    arguments = parser.parse_args()
    plain = {
        name: plain_training(VARIANTS[name].make_optimizer, VARIANTS[name].max_norm, steps=arguments.steps)
        for name in (ADAMW, SGD)
    }
    print("| strategy | ranks | AdamW: loss | grad norm | parameters | SGD: loss | grad norm | parameters |")
    print("|---|---|---|---|---|---|---|---|")
    for name, flags in STRATEGIES.items():
        world = 1 if name == "single" else arguments.world
        found = trained_by(flags, world, arguments.steps)
        cells = [f"{value:.1e}" for variant in (ADAMW, SGD) for value in differences(found[variant], plain[variant])]
        print(f"| {name} | {world} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
