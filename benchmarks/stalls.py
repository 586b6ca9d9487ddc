"""Makes one of two ranks stop, sleep, hold its interpreter or raise in each phase; prints how the run reports it.

    python benchmarks/stalls.py                     # every phase with every kind: 16 runs under torchrun
    python benchmarks/stalls.py --places save --kinds stop

A row ends with `ok` if all ranks ended with an error, the report (or the traceback) names rank, phase and line, and no
process and no file in /dev/shm or the temporary folder remains, but the error of a rank that torchrun has shown. The
exit code is 1 if a row does not.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "stalled_program.py"
TIMEOUT_S = 8
FLAGS = ["--num_prompts", "2", "--group_size", "2", "--max_steps", "3", "--checkpoint.every", "1", "--eval.every", "0"]
FLAGS += ["--log.tensorboard", "False", "--reward_timeout_s", "0", "--distributed.timeout_s", str(TIMEOUT_S)]
KINDS = ("stop", "sleep", "hold", "raise")
PHASES = {"reward": "reward exact_match", "generate": "generate", "backward": "learn", "save": "checkpoint"}


def left_behind(before: set[str], folder: Path) -> list[str]:
    """Returns processes and files that the run has left."""
    pids = [path.read_text() for path in folder.glob("run.pid*")]
    alive = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    return [*alive, *sorted(shared_files() - before)]


def shared_files() -> set[str]:
    """Returns the names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def names_of_files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def row(place: str, kind: str, strategy: str) -> str:
    """Returns a line of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder, before, started = Path(name), shared_files(), time.monotonic()
        command = [*FLAGS, "--strategy", strategy, "--output_dir", str(folder / "run")]
        stalled = {"STALLED": f"1 {place} {kind}", "TMPDIR": name}
        said = run_spmd(PROGRAM, *command, world_size=2, timeout_s=240, env=stalled, expect_failure=True, torchrun=True)
        seconds = time.monotonic() - started
        left = left_behind(before, folder)
        left += [path.name for path in folder.glob("torchelastic_*") if names_of_files(path) != {"error.json"}]
    if kind == "raise":
        is_told = "ZeroDivisionError: planted" in said and "did not come" not in said
        found = "the traceback" if is_told else "NO TRACEBACK"
    else:
        match = re.findall(r"rank 1 did not come: in phase '([^']*)' since (\d+) s; process \d+ on \S+ (.*)\.", said)
        is_told = len(match) == 1 and match[0][0] == PHASES[place] and "in stall_here" in said
        found = f"{match[0][0]}, {match[0][1]} s, {match[0][2]}" if match else "NO REPORT"
    verdict = "ok" if is_told and not left else f"NOT OK {left}"
    return f"| {place} | {kind} | {found} | {seconds:.0f} s | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fsdp", help="strategy of the runs (default: %(default)s)")
    parser.add_argument(
        "--places", nargs="+", choices=[*PHASES], default=[*PHASES], help="phases in which rank 1 stalls (default: all)"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what rank 1 does (default: all)"
    )
    options = parser.parse_args()
    print("| rank 1, in | does | the report says | whole run | |\n|---|---|---|---|---|")
    rows = []
    for place in options.places:
        for kind in options.kinds:
            rows.append(row(place, kind, options.strategy))
            print(rows[-1], flush=True)
    sys.exit(any("NOT OK" in line for line in rows))


if __name__ == "__main__":
    main()
