"""Trains on the built-in task for many steps and prints how memory grows, and how long the start takes.

    python benchmarks/soak.py [--steps 500 --every 25] [options of train_grpo.py]
    python -X importtime -c "import lightrl.trainers.grpo" 2> importtime.txt     # which imports the start waits for

RSS is that of the whole process; "Python" is the memory that tracemalloc counts, which slows a step down. Growth is
counted from a fifth of the run on, when caches are full; the exit code is 1 if RSS grew by more than --allowed MiB from
there. The time to the first step is measured without tracemalloc, in a separate process, in seconds and CPU seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

OPTIONS = ["--eval.every", "0", "--checkpoint.every", "0", "--log.tensorboard", "False", "--strategy", "single"]


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def run(num_steps: int, every: int, options: list[str]) -> list[tuple[int, float, float]]:
    """Returns (step, RSS, memory of Python objects) in MiB."""
    from lightrl.config import GRPOConfig, parse_config  # here, since the start counts them
    from lightrl.trainers.grpo import GRPOTrainer

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        flags = [*OPTIONS, "--max_steps", str(num_steps), "--output_dir", f"{folder}/run", *options]
        trainer = GRPOTrainer(parse_config(GRPOConfig, flags))
        if num_steps > 1:
            tracemalloc.start()
        for step in range(1, num_steps + 1):
            trainer.step()
            if step % every == 0 or step == num_steps:
                gc.collect()
                rows.append((step, rss_mib(), tracemalloc.get_traced_memory()[0] / 2**20))
                print(f"{step:6d}{rows[-1][1]:12.1f}{rows[-1][2]:12.1f}", flush=True)
        trainer.strategy.close()
    return rows


def measure_start(options: list[str]) -> tuple[float, float]:
    """Returns the seconds and CPU seconds from the start of a process to the end of its first step."""
    started = time.time()
    command = [sys.executable, __file__, "--only_start", *options]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    ended, cpu = json.loads(output.splitlines()[-1])
    return ended - started, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps of the run (default: %(default)s)")
    parser.add_argument("--every", type=int, default=25, help="steps between two rows (default: %(default)s)")
    parser.add_argument("--allowed", type=float, default=32.0, help="MiB by which RSS may grow (default: %(default)s)")
    parser.add_argument("--only_start", action="store_true", help=argparse.SUPPRESS)
    args, options = parser.parse_known_args()
    if args.only_start:
        run(1, 2, options)
        print(json.dumps([time.time(), time.process_time()]))
        return
    measure_start(options)  # makes the built-in model, and reads the imports into the cache of the disk
    wall, cpu = measure_start(options)
    print(f"start to first step: {wall:.1f} s ({cpu:.1f} s of CPU)")
    print(f"{'step':>6}{'RSS MiB':>12}{'Python MiB':>12}")
    rows = run(args.steps, args.every, options)
    first, last = next(row for row in rows if 5 * row[0] >= args.steps), rows[-1]
    grown = last[1] - first[1]
    growth = f"RSS {grown:+.1f} MiB, Python {last[2] - first[2]:+.2f} MiB, ratio {last[1] / first[1]:.3f}"
    print(f"from step {first[0]} to {last[0]}: {growth}")
    raise SystemExit(grown > args.allowed)


if __name__ == "__main__":
    main()
