"""Compares generation with guessed tokens (--native.lookup) with plain generation.

python benchmarks/lookup.py --models toy mid

A random model that takes the likeliest token soon repeats itself, and one that draws from all tokens never does: these
are the extremes between which real texts lie. Seconds are CPU seconds on one thread, the best of three rounds.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from decode import SHAPES, random_model

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.lookup import LookupEngine

ROWS, GUESSES, ROUNDS = (1, 2, 4, 8), (2, 4, 8), 3
LENGTH = {"toy": 128, "mid": 48}


def seconds(engine: NativeEngine, name: str, num_rows: int, temperature: float) -> float:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, SHAPES[name]["vocab_size"], 32).tolist() for _ in range(num_rows)]
    length = LENGTH.get(name, 48)
    params = [
        SamplingParams(max_new_tokens=length, seed=row, temperature=temperature, ignore_eos=True)
        for row in range(num_rows)
    ]
    started = time.process_time()
    engine.generate(prompts, params)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=sorted(SHAPES),
        default=["toy", "mid"],
        help="random models: toy has 0.8 and mid 42 million parameters (default: both)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | samples at once | text |", *(f"{count} guesses |" for count in GUESSES))
    print("|---" * (3 + len(GUESSES)) + "|")
    for name in arguments.models:
        settings = {"eos_token_ids": [], "device": torch.device("cpu")}
        plain = NativeEngine(random_model(name), **settings)
        guessing = [LookupEngine(random_model(name), num_guesses=count, **settings) for count in GUESSES]
        for num_rows in ROWS:
            for temperature, text in ((0.0, "repeats itself"), (1.0, "never does")):
                rounds = [
                    [seconds(engine, name, num_rows, temperature) for engine in (plain, *guessing)]
                    for _ in range(ROUNDS)
                ]
                base, *others = (min(column) for column in zip(*rounds, strict=True))
                print(f"| {name} | {num_rows} | {text} |", *(f"{base / other:.2f}x |" for other in others), flush=True)


if __name__ == "__main__":
    main()
