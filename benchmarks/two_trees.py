"""Compares the time of a GRPO step between two checkouts of lightrl, run in turn: before and after a change.

    git worktree add ../before COMMIT
    python benchmarks/two_trees.py ../before . --rounds 5 --steps 30

Both run scripts/train_grpo.py with the same options, in one process each. The result of a run is the median of
`time/step` over all steps but the first; the ratio is the median of second / first over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OPTIONS = ["--strategy", "single", "--eval.every", "0", "--checkpoint.every", "0", "--log.tensorboard", "False"]


def step_seconds(tree: Path, num_steps: int, num_threads: int, options: list[str]) -> float:
    """Median seconds of a step of one run of the tree's train_grpo.py."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(tree / "scripts/train_grpo.py"), *OPTIONS, "--max_steps", str(num_steps)]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(num_threads)}
        subprocess.run(
            [*command, "--output_dir", f"{folder}/run", *options],
            cwd=tree,
            env=environment,
            check=True,
            capture_output=True,
        )
        rows = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    return statistics.median([row["time/step"] for row in rows if "time/step" in row][1:])


def main() -> None:
    """Prints each run and the ratio of the two trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, help="the two checkouts, the older one first")
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=30, help="steps of a run (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a run (default: %(default)s)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="option of the trainer, such as --option=--num_prompts=8; may be repeated",
    )
    args = parser.parse_args()
    trees = [tree.resolve() for tree in args.trees]
    ratios = []
    for turn in range(args.rounds):
        order = trees if turn % 2 == 0 else trees[::-1]  # neither is always the first
        seconds = {tree: step_seconds(tree, args.steps, args.threads, args.option) for tree in order}
        before, after = seconds[trees[0]], seconds[trees[1]]
        ratios.append(after / before)
        print(f"round {turn + 1}: {before * 1e3:.1f} ms, {after * 1e3:.1f} ms, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median ratio second / first: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
