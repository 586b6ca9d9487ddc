"""Kills ranks of runs at random moments, resumes the runs, and compares them with an undisturbed one.

    python benchmarks/role_kills.py --kills 30
    python benchmarks/role_kills.py --worlds 2+1 --launcher torchrun --kills 6 [options of train_grpo.py]

A world T+K has T ranks that train and K that generate. Each run is killed up to --per_run times; each further start
resumes it, and the last one goes on to the end. With bound 0 (--rollout.max_staleness), the numbers of all steps and
the final weights must equal those of the undisturbed run. Above 0, the run is repeated from its schedule, which
compares every token. With --launcher nobody, kills come after the first step, and the other ranks must notice them on
their own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file

from lightrl.testing import SpmdError, run_program, run_spmd
from lightrl.testing.killed import Ending, Launcher, run_and_signal

ROOT = Path(__file__).parents[1]
SCRIPT, REPLAY = ROOT / "scripts/train_grpo.py", ROOT / "scripts/replay.py"
OPTIONS = ["--num_prompts", "8", "--group_size", "4", "--eval.every", "4", "--eval.max_prompts", "16"]
# Names of metrics that other runs of the same numbers do not share.
UNLIKE = ("time/", "memory/", "tokens/per_second", "sync/gb", "mismatch/", "tokens/computed_share")
MAX_END_S = 30.0


@dataclass(frozen=True)
class Kind:
    """A way to run."""

    trainers: int
    rollout: int
    bound: int
    steps: int
    further: tuple[str, ...] = ()  # options of train_grpo.py

    @property
    def name(self) -> str:
        return f"{self.trainers}+{self.rollout}, bound {self.bound}"

    @property
    def world(self) -> int:
        return self.trainers + self.rollout

    def options(self, folder: Path) -> list[str]:
        strategy = "fsdp" if self.trainers > 1 else "single"
        options = [*OPTIONS, "--strategy", strategy, "--max_steps", str(self.steps), "--checkpoint.every", "2"]
        options += ["--rollout_ranks", str(self.rollout), "--rollout.max_staleness", str(self.bound)]
        return [*options, *self.further, "--output_dir", str(folder)]

    def role_of(self, rank: int) -> str:
        is_trainer = rank < self.trainers
        return f"trainer rank {rank}" if is_trainer else f"rollout rank {rank - self.trainers}"


@dataclass
class Kill:
    """What came of a kill."""

    kind: Kind
    victim: int
    after_s: float
    ending: Ending
    steps: int  # finished when it came
    has_launcher: bool
    equals: str = "?"  # whether the run that went on from it equals the undisturbed one

    @property
    def named_by(self) -> str:
        """Who says which rank is gone. torchrun knows exit codes, while ranks that still connect know nobody."""
        name = self.kind.role_of(self.victim)
        if any(f"{name} {what}" in self.ending.said for what in ("is gone", "did not come")):
            return "the ranks"
        report = re.search(rf"rank +: {self.victim} \(local_rank.*\n +exitcode +: -9", self.ending.said)
        return "torchrun" if self.has_launcher and report else "NOBODY"

    @property
    def is_good(self) -> bool:
        is_over = not self.ending.is_late and self.ending.seconds < MAX_END_S
        return is_over and self.named_by != "NOBODY" and self.equals == "yes"

    def row(self) -> str:
        ending = self.ending
        seconds = "never" if ending.is_late else f"{ending.seconds:.1f}"
        cells = [self.kind.name, self.kind.role_of(self.victim), f"{self.after_s:.1f}", str(self.steps)]
        return f"| {' | '.join([*cells, seconds, self.named_by, self.equals])} |"


@dataclass
class Reference:
    """A run that nobody disturbs."""

    folder: Path
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [{name: value for name, value in row.items() if not name.startswith(UNLIKE)} for row in lines]


def run_to_the_end(kind: Kind, folder: Path, launcher: Launcher) -> float:
    started = time.monotonic()
    ending = run_and_signal(
        SCRIPT, *kind.options(folder), world_size=kind.world, victims=(), signum=0, when=lambda _: False,
        timeout_s=600, launcher=launcher,
    )  # fmt: skip
    if any(ending.codes):
        raise SystemExit(f"The run in {folder} failed:\n{ending.said}")
    return time.monotonic() - started


def difference(kind: Kind, folder: Path, reference: Reference) -> str:
    """Returns "yes", or what differs."""
    return _unlike_reference(folder, reference) if kind.bound == 0 else _unlike_replay(kind, folder)


def _unlike_reference(folder: Path, reference: Reference) -> str:
    for mine, wanted in zip(metrics(folder), metrics(reference.folder), strict=True):
        if mine != wanted:
            return f"NO: step {wanted['step']}"
    weights, wanted = _weights(folder), _weights(reference.folder)
    same = all(torch.equal(weights[name], value) for name, value in wanted.items())
    return "yes" if same else "NO: weights"


def _unlike_replay(kind: Kind, folder: Path) -> str:
    again = folder.with_name(f"{folder.name}-again")
    shutil.rmtree(again, ignore_errors=True)
    command = [sys.executable, str(REPLAY), str(folder), "--output_dir", str(again), "--strategy", "single"]
    try:
        run_program(command, timeout_s=600)
    except SpmdError as error:
        return f"NO: {str(error).strip().splitlines()[-1]}"
    rows, repeated = metrics(folder), metrics(again)
    for one, other in zip(rows, repeated, strict=True):
        if "loss" in one and not math.isclose(one["loss"], other["loss"], rel_tol=1e-4, abs_tol=1e-5):
            return f"NO: loss of step {one['step']}"
    weights, wanted = _weights(folder), _weights(again)
    gap = max(float((weights[name].float() - value.float()).abs().max()) for name, value in wanted.items())
    shutil.rmtree(again)
    return "yes" if gap < 1e-3 else f"NO: weights by {gap:.1e}"


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final/model.safetensors")


def kills_of_a_run(kind: Kind, reference: Reference, folder: Path, args: Any, draw: random.Random) -> Iterator[Kill]:
    """Kills a run up to --per_run times and lets it end; yields the kills."""
    found: list[Kill] = []
    for _ in range(args.per_run):
        after, victim = draw.uniform(0, reference.seconds), draw.randrange(kind.world)
        when = _moment(after, folder if args.launcher == "nobody" else None)
        ending = run_and_signal(
            SCRIPT, *kind.options(folder), world_size=kind.world, victims=(victim,), signum=signal.SIGKILL,
            when=when, timeout_s=600, end_timeout_s=2 * MAX_END_S,
            launcher=args.launcher,
        )  # fmt: skip
        steps = len([row for row in metrics(folder) if "loss" in row])
        if not ending.was_signalled or steps == kind.steps:
            break  # it came to its end first, so that there is nothing that a kill could cut off
        found.append(Kill(kind, victim, after, ending, steps, args.launcher != "nobody"))
        if args.verbose or found[-1].named_by == "NOBODY":
            print(ending.said, flush=True)
    run_to_the_end(kind, folder, args.launcher)
    for kill in found:
        kill.equals = difference(kind, folder, reference)
        yield kill


def _moment(after_s: float, folder: Path | None) -> Callable[[float], bool]:
    """Returns what says that the time has come, and that the run of the folder has logged a step meanwhile."""
    num_rows = len(metrics(folder)) if folder is not None else 0
    return lambda seconds: seconds >= after_s and (folder is None or len(metrics(folder)) != num_rows)


def kinds_of(args: Any) -> list[Kind]:
    counts = [tuple(map(int, world.split("+"))) for world in args.worlds]
    further = tuple(args.further)
    return [Kind(*count, bound, args.steps, further) for bound in args.bounds for count in counts]


def _import_once(folder: Path) -> None:
    """Has the processes that ranks are forked from import what they need, which is no part of a run's time."""
    nothing = folder / "nothing.py"
    nothing.write_text("")
    run_spmd(nothing, world_size=2)


def main() -> None:
    """Prints a row per kill and a sum; exit code 1 if one was bad."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="kills in total (default: %(default)s)")
    parser.add_argument(
        "--worlds",
        nargs="+",
        default=["1+1", "2+1", "1+2"],
        help="ranks that train + ranks that generate (default: 1+1 2+1 1+2)",
    )
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=[0, 1], help="values of --rollout.max_staleness (default: 0 1)"
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of a run (default: %(default)s)")
    parser.add_argument(
        "--per_run", type=int, default=3, help="kills after which a run may go on to its end (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default: %(default)s)")
    parser.add_argument(
        "--launcher",
        choices=get_args(Launcher),
        default="torchrun",
        help="program that starts and ends the ranks (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="show what the killed runs print")
    args, args.further = parser.parse_known_args()
    draw, done = random.Random(args.seed), []
    print("| run | killed | after s | steps | end s | named by | resumed run equals |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        if args.launcher != "torchrun":
            _import_once(Path(name))
        references: dict[Kind, Reference] = {}
        kinds = kinds_of(args)
        while len(done) < args.kills:
            kind = kinds[len(done) // args.per_run % len(kinds)]
            if kind not in references:
                folder = Path(name) / f"whole-{len(references)}"
                references[kind] = Reference(folder, run_to_the_end(kind, folder, args.launcher))
            folder = Path(name) / "run"
            for kill in kills_of_a_run(kind, references[kind], folder, args, draw):
                print(kill.row(), flush=True)
                done.append(kill)
            shutil.rmtree(folder, ignore_errors=True)
    longest = max(kill.ending.seconds for kill in done)
    num_good = sum(kill.is_good for kill in done)
    print(f"{num_good} of {len(done)} kills as wanted; the longest time to the end is {longest:.1f} s")
    if num_good < len(done):
        sys.exit(1)


if __name__ == "__main__":
    main()
