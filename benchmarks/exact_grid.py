"""Prints the hashes of runs with `--exact` that differ only in how they are spread: the grid of docs/exact.md.

    python benchmarks/exact_grid.py                      # every recipe at every setting: 54 runs, about 25 minutes
    python benchmarks/exact_grid.py --recipes ppo --settings "1 single" "8 fsdp"

A hash covers all saved weights (the first line of weights.sha256) and metrics.jsonl without times and memory. The exit
code is 1 if the hashes of a recipe differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

from lightrl.testing import run_spmd

ROOT = Path(__file__).resolve().parents[1]
COMMON = [
    *("--exact", "True", "--max_steps", "3", "--num_prompts", "8", "--group_size", "4", "--eval.every", "0"),
    *("--checkpoint.every", "0", "--log.tensorboard", "False", "--lr", "1e-3"),
    *("--exact_tile_tokens", "32"),  # several tiles in each update, so that ranks share it
]
UPDATES = ["--num_minibatches", "2", "--num_epochs", "2", "--algorithm.kl_coef", "0.01"]
RECIPES = {  # script and flags
    "grpo": ("grpo", []),
    "grpo, KL, 2 mini-batches x 2 epochs": ("grpo", [*UPDATES, "--optim.max_norm", "0.1"]),
    "grpo, LoRA": ("grpo", ["--lora.rank", "4", *UPDATES]),
    "grpo, dynamic sampling": ("grpo", ["--dynamic_sampling.enabled", "True", "--eval.every", "2"]),
    "grpo, top-p 0.9, top-k 8": ("grpo", ["--top_p", "0.9", "--top_k", "8", "--temperature", "0.8", *UPDATES]),
    "ppo": ("ppo", [*UPDATES, "--algorithm.reward_normalization", "running"]),
}
SETTINGS = {
    "1 single": (1, ["--strategy", "single"]),
    "1 single, 3 samples": (1, ["--strategy", "single", "--micro_batch_size", "3"]),
    "1 fsdp": (1, ["--strategy", "fsdp"]),
    "2 ddp": (2, ["--strategy", "ddp", "--max_tokens_per_microbatch", "64"]),
    "2 fsdp": (2, ["--strategy", "fsdp", "--micro_batch_size", "1"]),
    "3 ddp": (3, ["--strategy", "ddp"]),
    "3 fsdp": (3, ["--strategy", "fsdp"]),
    "4 fsdp": (4, ["--strategy", "fsdp", "--fsdp.reshard_after_forward", "False"]),
    "8 fsdp": (8, ["--strategy", "fsdp"]),
}
NOT_OF_THE_RESULT = ("time/", "memory/", "tokens/per_second", "sync/gb_per_s")


def hashes(folder: Path) -> str:
    """Returns the first digits of the hash of all weights, and of the metrics."""
    weights = [path.read_text().splitlines()[0] for path in sorted(folder.glob("final*/weights.sha256"))]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: row[name] for name in sorted(row) if not name.startswith(NOT_OF_THE_RESULT)} for row in rows]
    of_metrics = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    of_weights = hashlib.sha256(" ".join(weights).encode()).hexdigest()
    assert weights
    return f"{of_weights[:12]} {of_metrics[:12]}"


def run(recipe: str, setting: str) -> str:
    (script, flags), (world, spread) = RECIPES[recipe], SETTINGS[setting]
    with tempfile.TemporaryDirectory() as name:
        arguments = [*COMMON, *flags, *spread, "--output_dir", f"{name}/run"]
        run_spmd(str(ROOT / "scripts" / f"train_{script}.py"), *arguments, world_size=world, timeout_s=600, cwd=ROOT)
        return hashes(Path(name) / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="algorithms and options (default: all)"
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=list(SETTINGS),
        help="numbers of ranks with a strategy (default: all)",
    )
    arguments = parser.parse_args()
    is_equal = True
    for recipe in arguments.recipes:
        found = {}
        for setting in arguments.settings:
            found[setting] = run(recipe, setting)
            print(f"| {recipe} | {setting} | `{found[setting].replace(' ', '` | `')}` |", flush=True)
        is_equal &= len(set(found.values())) == 1
    print("all equal within each recipe" if is_equal else "THE HASHES DIFFER")
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
