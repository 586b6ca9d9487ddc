"""Runs short benchmarks and compares their ratios with benchmarks/baselines.json; exits with 1 if one got worse.

    make bench
    python benchmarks/bench.py [--only sync packing ...] [--update]

Only ratios are kept: of the CPU seconds of two ways measured in turn in one process and, for "soak", of a process's
memory at the end and at a fifth of a run. They are kept for each model of processor, since products gain more than the
rest of a step from wide instructions. A ratio beyond its tolerance counts as slower. --update writes the new
measurements, on a processor without any and after an intended change.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BASELINES = ROOT / "benchmarks" / "baselines.json"
TOLERANCE = 0.3  # of a ratio, where the file names none


class Benchmark(NamedTuple):
    """A program in short form, and where it prints its ratios: the groups `name` and `ratio` of a pattern."""

    command: str
    pattern: str
    more_is_better: bool = True


BENCHMARKS = {
    "sync": Benchmark(
        "sync.py --models toy mid --rounds 5",
        r"(?P<name>[\d.]+ MB \w+) *: .*ratio +[\d.]+ \((?P<ratio>[\d.]+)\)",
        more_is_better=False,
    ),
    "packing": Benchmark("packing.py --model toy --threads 1", r"(?P<name>packed) .* (?P<ratio>[\d.]+)$"),
    "shared_prompts": Benchmark(
        "shared_prompts.py --model toy --prompts 64 256 --no-peak", r" +(?P<name>\d+)  .*?-> .*?= +(?P<ratio>[\d.]+)x"
    ),
    "learn_floor": Benchmark(
        "learn_floor.py --models toy --rounds 5", r"(?P<name>toy) +(\S+ +){4}(?P<ratio>[\d.]+)", more_is_better=False
    ),
    "decode": Benchmark("decode.py --models toy", r"(?P<name>toy: .*?)  +\d.* (?P<ratio>[\d.]+)x$"),
    "soak": Benchmark(
        "soak.py --steps 500 --every 50 --num_prompts 2 --group_size 4 --max_new_tokens 8",
        r"(?P<name>from step \d+ to \d+): RSS .* ratio (?P<ratio>[\d.]+)$",
        more_is_better=False,
    ),
}


def ratios_in(name: str, output: str) -> dict[str, float]:
    """Returns the ratios that a benchmark printed, by their names."""
    found = re.finditer(BENCHMARKS[name].pattern, output, re.MULTILINE)
    return {f"{name}: {' '.join(match['name'].split())}": float(match["ratio"]) for match in found}


def processor() -> str:
    """Returns the model of the processor, as Linux names it, and elsewhere its architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure(name: str) -> dict[str, float]:
    program, *options = BENCHMARKS[name].command.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / program), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    ratios = ratios_in(name, done.stdout)
    if done.returncode or not ratios:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr[-2000:]}")
    return ratios


def is_slower(name: str, ratio: float, baseline: float, tolerance: float) -> bool:
    """Returns whether a ratio is worse than its baseline by more than the tolerance, which is a share of it."""
    more_is_better = BENCHMARKS[name.partition(":")[0]].more_is_better
    return ratio < baseline / (1 + tolerance) if more_is_better else ratio > baseline * (1 + tolerance)


def verdict(name: str, ratio: float, baselines: dict[str, dict[str, float]]) -> str:
    """Returns "slower", "new" for a ratio without a baseline, or an empty text."""
    known = baselines.get(name)
    if known is None:
        return "new"
    return "slower" if is_slower(name, ratio, known["ratio"], known.get("tolerance", TOLERANCE)) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(BENCHMARKS),
        default=sorted(BENCHMARKS),
        help="benchmarks to run (default: all)",
    )
    parser.add_argument("--update", action="store_true", help="write the ratios into baselines.json")
    args = parser.parse_args()
    of_processors: dict[str, dict[str, dict[str, float]]] = json.loads(BASELINES.read_text())
    baselines = of_processors.setdefault(processor(), {})
    slower = []
    print(f"{'benchmark':<44}{'ratio':>8}{'before':>8}")
    for benchmark in args.only:
        for name, ratio in measure(benchmark).items():
            found = verdict(name, ratio, baselines)
            before = baselines.get(name, {}).get("ratio", float("nan"))
            print(f"{name:<44}{ratio:8.2f}{before:8.2f}  {found}", flush=True)
            slower += [name] if found == "slower" else []
            if args.update:
                baselines[name] = {**baselines.get(name, {}), "ratio": ratio}
    if args.update:
        BASELINES.write_text(json.dumps(of_processors, indent=2, sort_keys=True) + "\n")
    elif slower:
        raise SystemExit(f"Slower than {BASELINES.name} says: {', '.join(slower)}.")
    elif not baselines:
        print(f"{BASELINES.name} has no ratios of this processor, {processor()}; --update adds these.")


if __name__ == "__main__":
    main()
