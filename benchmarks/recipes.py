"""Runs every recipe of configs/ on the built-in task and prints the held-out accuracy before and after.

    python benchmarks/recipes.py [--recipes grpo dapo ...] [--seed 0]

Prints the table of docs/recipes.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightrl.testing import run_program

ROOT = Path(__file__).resolve().parents[1]
NOT_HERE = {"gsm8k_8gpu"}  # needs GPUs


def recipe_names() -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem not in NOT_HERE)


def rows_of(recipe: str, seed: int) -> list[dict[str, Any]]:
    """Returns what the run logged at each step."""
    script = ROOT / "scripts" / f"train_{'ppo' if recipe.startswith('ppo') else 'grpo'}.py"
    with tempfile.TemporaryDirectory() as name:
        flags = ["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--output_dir", f"{name}/run"]
        flags += ["--seed", str(seed), "--checkpoint.every", "0", "--log.tensorboard", "False"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        run_program([sys.executable, str(script), *flags], timeout_s=1800, env={"PYTHONPATH": path})
        return [json.loads(line) for line in (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=recipe_names())
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| recipe | steps | samples | accuracy before | by half-way | after |")
    print("|---|---|---|---|---|---|")
    for recipe in arguments.recipes:
        rows = rows_of(recipe, arguments.seed)
        accuracy = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
        steps = [row for row in rows if row["step"]]
        half = max(step for step in accuracy if step <= len(steps) / 2)
        samples = sum(row["tokens/response"] / row["tokens/response_mean"] for row in steps)
        cells = [recipe, str(len(steps)), f"{samples:,.0f}"]
        cells += [f"{value:.3f}" for value in (accuracy[0], accuracy[half], accuracy[len(steps)])]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
