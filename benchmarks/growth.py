"""Prints the cost of a trained token as a step gets more prompts, and as a run gets more ranks.

    python benchmarks/growth.py [--prompts 8 64 512 --ranks 1 2 4 8] [options of train_grpo.py]

The cost is the CPU time of a step, summed over ranks, per prompt and response token that it trains: the median of the
steps after the first two, in microseconds. More prompts are trained in one process and compared with the first row. A
rank (gloo, one thread, ddp) has --per_rank prompts. Sharing cores alone slows ranks down, so they are compared with as
many processes that train the same prompts separately at the same time: the ratio is the cost of being one run. CPU time
does not include waiting, so there may be more ranks than cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OPTIONS = ["--eval.every", "0", "--checkpoint.every", "0", "--log.tensorboard", "False"]
WARM_UP = 2  # steps


def run(num_steps: int, options: list[str]) -> tuple[float, int]:
    """Returns the CPU seconds a token of all ranks, and the tokens of the last step."""
    import torch

    from lightrl.config import GRPOConfig, parse_config
    from lightrl.trainers.fit import build_trainer
    from lightrl.trainers.grpo import GRPOTrainer

    torch.set_num_threads(1)
    trainer = build_trainer(GRPOTrainer, parse_config(GRPOConfig, options))
    costs, tokens = [], 0
    for _ in range(num_steps):
        started = time.process_time()
        metrics = trainer.step().metrics
        spent = sum(trainer.strategy.comm.all_gather_object(time.process_time() - started))
        tokens = round(metrics["tokens/prompt"] + metrics["tokens/response"])
        costs.append(spent / tokens)
    trainer.close()
    return statistics.median(costs[WARM_UP:]), tokens


def start(folder: Path, num_prompts: int, num_ranks: int, num_steps: int, options: list[str]) -> subprocess.Popen[str]:
    """Starts a run in as many processes as ranks, which leaves its result in the folder."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), __file__, "--child", str(folder)]
    command += ["--steps", str(num_steps), "--strategy", "ddp" if num_ranks > 1 else "single", *OPTIONS]
    command += ["--num_prompts", str(num_prompts), "--output_dir", str(folder / "run"), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def measure(num_prompts: int, num_ranks: int, num_runs: int, args: argparse.Namespace) -> tuple[float, int]:
    """Returns the mean of the costs of runs at the same time, and the tokens of a step of the last."""
    costs, tokens = [], 0
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(index) for index in range(num_runs)]
        runs = [start(folder, num_prompts, num_ranks, args.steps, args.options) for folder in folders]
        for process, folder in zip(runs, folders, strict=True):
            output = process.communicate()[0]
            if process.returncode:
                raise SystemExit(f"{num_prompts} prompts on {num_ranks} ranks failed:\n{output[-4000:]}")
            cost, tokens = json.loads((folder / "result.json").read_text())
            costs.append(cost)
    return statistics.mean(costs), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        default=[8, 64, 512],
        help="prompts of a step in one process; none: leave this out (default: 8 64 512)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="*",
        default=[1, 2, 4, 8],
        help="numbers of ranks; none: leave this out (default: 1 2 4 8)",
    )
    parser.add_argument("--per_rank", type=int, default=64, help="prompts of each rank (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=12, help="steps of a run, of which two are a warm-up (default: %(default)s)"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args, args.options = parser.parse_known_args()
    if args.child:
        result = run(args.steps, args.options)
        if os.environ.get("RANK", "0") == "0":
            (args.child / "result.json").write_text(json.dumps(result))
        return
    first = 0.0
    for count in args.prompts:
        cost, tokens = measure(count, 1, 1, args)
        first = first or cost
        print(f"{count:4d} prompts {tokens:8,d} tokens {cost * 1e6:7.2f} us each, ratio {cost / first:.2f}", flush=True)
    for count in args.ranks:
        cost, tokens = measure(args.per_rank * count, count, 1, args)
        apart, _ = measure(args.per_rank, 1, count, args)
        print(
            f"{count:4d} ranks {tokens:10,d} tokens {cost * 1e6:7.2f} us each, "
            f"apart {apart * 1e6:7.2f}, ratio {cost / apart:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
