"""Prints the cost of `--exact`: runs with and without it, in turn, on the built-in task and on a 40 M model.

    python benchmarks/exact.py [--rounds 3] [--steps 12] [--threads 1]

built-in: a whole GRPO step of 16 prompts x 16 samples. 40 M: one update on 8 samples of 512 tokens. Each run is a
separate process; a round has one of each, and the ratio of a round is that of its medians. Times are CPU times, which
other work on the machine disturbs least.
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
from typing import Any


def builtin_steps(is_exact: bool, num_steps: int) -> list[float]:
    from lightrl.config import CheckpointConfig, EvalConfig, GRPOConfig, LogConfig
    from lightrl.exact.run import exact
    from lightrl.trainers.grpo import GRPOTrainer

    seconds: list[float] = []

    class Timed(GRPOTrainer):
        def step(self) -> Any:
            started = time.process_time()
            report = super().step()
            seconds.append(time.process_time() - started)
            return report

    config = GRPOConfig(
        exact=is_exact,
        strategy="single",
        max_steps=num_steps,
        output_dir=tempfile.mkdtemp(),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )
    config.log = type(config.log)(tensorboard=False)
    assert isinstance(config.log, LogConfig)
    (exact(Timed) if is_exact else Timed)(config).fit()
    return seconds[1:]


def large_updates(is_exact: bool, num_steps: int) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from lightrl.config import GRPOConfig
    from lightrl.exact.environment import fix_arithmetic
    from lightrl.exact.strategy import exact_strategy
    from lightrl.models.policy import Policy
    from lightrl.strategy import create_strategy
    from lightrl.testing.tiny_training import loss_fn, make_batch, num_tokens, samples

    if is_exact:
        fix_arithmetic()
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=16_384, max_position_embeddings=1024, tie_word_embeddings=True, **shape, **heads)
    )
    config = GRPOConfig(exact=is_exact, strategy="single")
    strategy = (exact_strategy if is_exact else create_strategy)(config)
    strategy.setup_distributed()
    trained = strategy.prepare_trained(Policy(model))
    items = [_long(item) for item in samples(0, 8)]
    per_tile = config.exact_tile_tokens // 512
    tiles = [make_batch(items[start : start + per_tile]) for start in range(0, len(items), per_tile)]
    batches = tiles if is_exact else [make_batch(items)]  # without --exact all samples fit into one micro-batch
    seconds = []
    for _ in range(num_steps):
        started = time.process_time()
        strategy.train_batch(batches, loss_fn, num_tokens, model=trained.model)
        seconds.append(time.process_time() - started)
    return seconds[1:]


def _long(item: Any) -> Any:
    """Returns the sample with a response that makes it 512 tokens long."""
    from dataclasses import replace

    length = 512 - len(item.sample.prompt_ids)
    tokens = tuple((7 * index) % 98 for index in range(length))
    values = {"response_ids": tokens, "sampler_logprobs": (-9.7,) * length, "versions": (0,) * length}
    return replace(item, sample=replace(item.sample, **values))


TASKS = {"built-in": builtin_steps, "40 M": large_updates}


def in_a_process(task: str, is_exact: bool, steps: int, threads: int) -> float:
    command = [sys.executable, __file__, "--child", task, "--steps", str(steps), *(["--exact"] if is_exact else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{task} failed:\n{done.stderr[-4000:]}")
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=12, help="steps or updates of a run (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the process (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="what to train (default: both)")
    parser.add_argument("--child", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--exact", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(TASKS[args.child](args.exact, args.steps)))
        return
    for task in args.tasks:
        ratios = []
        for _ in range(args.rounds):
            plain, exact = (in_a_process(task, flag, args.steps, args.threads) for flag in (False, True))
            ratios.append(exact / plain)
            print(f"{task}: plain {plain * 1e3:.0f} ms, exact {exact * 1e3:.0f} ms, {ratios[-1]:.2f}x", flush=True)
        print(f"{task}: median ratio {statistics.median(ratios):.2f}x, {args.threads} thread(s)", flush=True)


if __name__ == "__main__":
    main()
