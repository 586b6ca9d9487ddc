"""Measures how long trainers wait for samples of other ranks, for different bounds on the samples' age.

    python benchmarks/separate.py                                   # 1 + 1 ranks, bounds 0, 1, 2 in turn
    python benchmarks/separate.py --bounds 1 --steps 200 --eval_every 20 --rounds 1

The runs train the built-in task. The share is the time spent waiting for a batch (time/rollout), divided by the whole
time (time/step), over all steps but the first two. With --eval_every, it also prints the held-out accuracy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from lightrl.testing import run_spmd

SCRIPT = Path(__file__).parents[1] / "scripts/train_grpo.py"
FIRST_STEPS = 2  # left out: rollout ranks begin with nothing under way


def rows_of_a_run(bound: int, args: Any) -> list[dict[str, float]]:
    """Returns the rows of metrics.jsonl of a run."""
    trainers, rollout = map(int, args.world.split("+"))
    strategy = "fsdp" if trainers > 1 else "single"
    options = ["--rollout_ranks", str(rollout), "--rollout.max_staleness", str(bound), "--strategy", strategy]
    options += ["--max_steps", str(args.steps), "--eval.every", str(args.eval_every), "--checkpoint.every", "0"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [*options, "--output_dir", str(folder), *args.option]
        run_spmd(SCRIPT, *command, world_size=trainers + rollout, timeout_s=3600)
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def waiting_share(rows: list[dict[str, float]]) -> tuple[float, float]:
    """Returns the share of time that the trainer waits, and the seconds of a step."""
    counted = [row for row in rows if "time/step" in row][FIRST_STEPS:]
    total = sum(row["time/step"] for row in counted)
    return sum(row["time/rollout"] for row in counted) / total, total / len(counted)


def main() -> None:
    """Prints each run, and the median share of each bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="1+1", help="ranks that train + ranks that generate (default: %(default)s)")
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=[0, 1, 2], help="values of --rollout.max_staleness (default: 0 1 2)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs with each bound (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run (default: %(default)s)")
    parser.add_argument(
        "--eval_every", type=int, default=0, help="steps between evaluations; 0: none (default: %(default)s)"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="option of the trainer, such as --option=--num_prompts=8; may be repeated",
    )
    args = parser.parse_args()
    shares: dict[int, list[float]] = {bound: [] for bound in args.bounds}
    for turn in range(args.rounds):
        for bound in args.bounds if turn % 2 == 0 else args.bounds[::-1]:  # none is always the first
            rows = rows_of_a_run(bound, args)
            share, seconds = waiting_share(rows)
            shares[bound].append(share)
            print(f"round {turn + 1}, bound {bound}: waits {share:.0%} of {seconds:.2f} s a step", flush=True)
            curve = [f"{row['step']}: {row['eval/accuracy']:.3f}" for row in rows if "eval/accuracy" in row]
            if curve:
                print(f"  accuracy at step {', '.join(curve)}", flush=True)
    for bound, found in shares.items():
        print(f"bound {bound}: median share {statistics.median(found):.0%}")


if __name__ == "__main__":
    main()
