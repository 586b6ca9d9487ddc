"""Kills runs of GRPO and PPO again and again, and compares their results with those of undisturbed runs.

    python benchmarks/chaos.py --kills 100 --seed 0

Each start draws a number of ranks, a strategy, a point of the work, and a victim: one rank, all ranks, or torchrun.
SIGKILL ends the victim at that point; the same command, with a new draw, continues the run. A run that comes to its end
must have every row of metrics.jsonl once, and the numbers, samples and weights of the undisturbed run, made by one
process. After each kill, the newest complete checkpoint must not be older than the last one reported as saved.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lightrl.builtin.model import tiny_model
from lightrl.checkpoint import CheckpointDirectory
from lightrl.testing import free_port, run_spmd
from lightrl.testing.spmd import SpmdError

PROGRAM = Path(__file__).parent / "chaos_program.py"
STEPS = 6
ON_ANY_RANK = ("rollout", "reward", "backward", "sync", "writing")
ON_RANK_0 = ("metrics", "marking", "renaming", "pruning", "deleting", "final")
REWARD = """
def odd_digits(sample):
    return sum(character in "13579" for character in sample.text) / 8
"""
MEASURED = ("time/", "memory/", "tokens/per_second", "sync/", "mismatch/", "canary/", "balance/", "tokens/computed")
UPDATES = ["--num_minibatches", "2", "--num_epochs", "2", "--algorithm.kl_coef", "0.1"]
KINDS = {
    "grpo": [*UPDATES, "--optim.schedule", "cosine", "--optim.warmup_steps", "2", "--dynamic_sampling.enabled", "True"],
    "ppo": [*UPDATES, "--algorithm.kl_target", "0.001", "--algorithm.reward_normalization", "running"],
}


@dataclass
class Chaos:
    """The runs, and what has happened to them."""

    folder: Path
    draw: random.Random
    agents: bool  # also kill torchrun, which takes longer to start
    max_ranks: int
    exact: bool
    kills: Counter[str] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    finished: int = 0

    def flags(self, kind: str, run: Path) -> list[str]:
        """Returns the options that all starts of a run have in common."""
        data = [*("--model", str(self.folder / "model")), *("--train_data", str(self.folder / "train.jsonl"))]
        sizes = ["--num_prompts", "4", "--group_size", "4", "--max_new_tokens", "8", "--max_steps", str(STEPS)]
        exact = ["--exact", "True"] if self.exact else []
        return [
            *(kind, *data, "--reward", f"{self.folder / 'reward.py'}:odd_digits", *sizes, "--lr", "1e-3"),
            *("--ema_decay", "0.5", "--eval.every", "0", "--checkpoint.every", "1", "--log.tensorboard", "False"),
            *(*KINDS[kind], *exact, "--output_dir", str(run)),
        ]

    def start(self, flags: list[str], *, world: int, chaos: str) -> tuple[bool, str]:
        """Runs the program; returns whether it came to its end, and what it said."""
        pids = self.folder / "pids"
        shutil.rmtree(pids, ignore_errors=True)
        pids.mkdir()
        environment = {"CHAOS_PIDS": str(pids), **({"CHAOS": chaos} if chaos else {})}
        if chaos.endswith("agent"):
            return self._start_under_torchrun(flags, world, environment)
        try:
            said = run_spmd(PROGRAM, *flags, world_size=world, timeout_s=120, env=environment, expect_failure=True)
        except SpmdError as error:
            if not str(error).startswith("Exit code 0"):
                raise
            return True, str(error)
        return False, said

    def _start_under_torchrun(self, flags: list[str], world: int, environment: dict[str, str]) -> tuple[bool, str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world)]
        command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), str(PROGRAM), *flags]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with tempfile.TemporaryFile("w+") as output:
            launcher = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )
            code = launcher.wait(timeout=200)
            deadline = time.monotonic() + 30
            while any(_is_alive(int(path.name)) for path in (self.folder / "pids").iterdir()):
                if time.monotonic() > deadline:
                    raise AssertionError("ranks outlive their torchrun")
                time.sleep(0.05)
            output.seek(0)
            return code == 0, output.read()

    def round(self, kind: str, whole: Path, run: Path, max_kills: int) -> None:
        """Kills a run until it comes to its end, and compares it with the undisturbed one."""
        killed = 0
        while True:
            is_spared = killed >= max_kills
            world, flags, chaos = self._drawn(run, is_spared=is_spared)
            is_done, said = self.start([*self.flags(kind, run), *flags], world=world, chaos=chaos)
            if is_done:
                break
            if "] killed: " not in said:
                raise AssertionError(f"{kind}: the run failed by itself ({chaos})\n{said}")
            killed += 1
            self._count(chaos, world, flags)
            self._check_newest(run, said)
        self.finished += 1
        compare(whole, run, exact=self.exact)

    def _drawn(self, run: Path, *, is_spared: bool) -> tuple[int, list[str], str]:
        """Draws ranks, options that may change between starts, and the kill."""
        world = self.draw.randint(1, self.max_ranks)
        strategy = self.draw.choice(["single", "fsdp"] if world == 1 else ["ddp", "fsdp"])
        flags = ["--strategy", strategy, "--micro_batch_size", str(self.draw.choice([1, 3, 16]))]
        flags += ["--checkpoint.keep", str(self.draw.choice([1, 2]))]
        flags += ["--checkpoint.asynchronous", str(self.draw.random() < 0.3)]
        point = self.draw.choice([*ON_ANY_RANK, *ON_RANK_0])
        ranks = [str(rank) for rank in range(world)] if point in ON_ANY_RANK else ["0"]
        victim = self.draw.choice([*ranks[-2:], "all", *(["agent"] if self.agents and point in ON_ANY_RANK else [])])
        done = max(CheckpointDirectory(run / "checkpoints", keep=1).steps(), default=0)
        step = STEPS if point == "final" else min(done + self.draw.choice([0, 1, 1, 2]), STEPS - 1)
        return world, flags, "" if is_spared else f"{point} {step} {victim}"

    def _count(self, chaos: str, world: int, flags: list[str]) -> None:
        point, _, victim = chaos.split()
        self.kills[f"{point}, {victim if victim in ('all', 'agent') else 'one rank'}"] += 1
        self.starts[f"{flags[1]} on {world}"] += 1

    def _check_newest(self, run: Path, said: str) -> None:
        saved = Path(f"{run}.saved")
        reported = int(saved.read_text().split()[-1]) if saved.exists() else 0
        newest = CheckpointDirectory(run / "checkpoints", keep=1).latest()
        found = int(newest.name.rpartition("-")[2]) if newest is not None else 0
        if found < reported:
            raise AssertionError(f"step {reported} was saved, and the newest checkpoint is of step {found}\n{said}")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- The comparison --------------------------------------------------------------------------------------------------


def compare(whole: Path, run: Path, *, exact: bool) -> None:
    """Raises AssertionError unless the run has the rows, samples and weights of the undisturbed one."""
    ours, theirs = _rows(whole / "metrics.jsonl"), _rows(run / "metrics.jsonl")
    assert [row["step"] for row in theirs] == [row["step"] for row in ours], [row["step"] for row in theirs]
    for mine, yours in zip(ours, theirs, strict=True):
        for name, value in mine.items():
            if not name.startswith(MEASURED):
                assert _is_close(value, yours.get(name), 0.0 if exact else 1e-4), (
                    mine["step"],
                    name,
                    value,
                    yours.get(name),
                )
    keys = ("step", "position", "sample", "prompt", "response")
    told, retold = ([[row[key] for key in keys] for row in _rows(folder / "samples.jsonl")] for folder in (whole, run))
    assert told == retold, "other samples"
    for name in ("final", "final_ema"):
        compare_weights(whole / name, run / name, exact=exact)


def compare_weights(whole: Path, run: Path, *, exact: bool) -> None:
    """Compares the hashes of two saved models, or their weights to 1e-4."""
    if exact:
        assert (whole / "weights.sha256").read_text() == (run / "weights.sha256").read_text(), whole.name
        return
    (mine,), (yours,) = list(whole.glob("*.safetensors")), list(run.glob("*.safetensors"))
    wanted, found = load_file(mine), load_file(yours)
    assert sorted(wanted) == sorted(found)
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _is_close(mine: Any, yours: Any, tolerance: float) -> bool:
    if isinstance(mine, int | float) and isinstance(yours, int | float):
        return math.isclose(mine, yours, rel_tol=tolerance, abs_tol=tolerance / 10)
    return bool(mine == yours)


# ---- The command -----------------------------------------------------------------------------------------------------


def write_inputs(folder: Path) -> None:
    """Writes a tiny random model, prompts and a reward."""
    model, tokenizer = tiny_model()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{left}+{left + 3}=", "answer": str(2 * left + 3)} for left in range(1, 12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills in total (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default: %(default)s)")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(KINDS),
        default=list(KINDS),
        help="algorithms, which take turns (default: both)",
    )
    parser.add_argument("--max_ranks", type=int, default=4, help="most ranks of a start (default: %(default)s)")
    parser.add_argument(
        "--kills_per_run", type=int, default=10, help="kills after which a run may finish (default: %(default)s)"
    )
    parser.add_argument("--agents", action="store_true", help="also kill torchrun itself")
    parser.add_argument("--exact", action="store_true", help="compare hashes, with --exact True")
    options = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        draw = random.Random(options.seed)
        chaos = Chaos(Path(name), draw, options.agents, options.max_ranks, options.exact)
        write_inputs(chaos.folder)
        number = 0
        while (left := options.kills - chaos.kills.total()) > 0:
            kind = options.kinds[number % len(options.kinds)]
            whole, run = chaos.folder / f"whole-{kind}", chaos.folder / f"run-{number}"
            if not whole.exists():
                is_done, said = chaos.start(chaos.flags(kind, whole), world=1, chaos="")
                assert is_done, said
            chaos.round(kind, whole, run, min(left, options.kills_per_run))
            number += 1
            print(
                f"{chaos.kills.total()} kills, {chaos.finished} runs finished, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    report(chaos)


def report(chaos: Chaos) -> None:
    """Prints what was survived."""
    print(f"survived {chaos.kills.total()} kills in {chaos.finished} runs; each ended as the undisturbed one")
    for title, counter in (("killed", chaos.kills), ("ended starts", chaos.starts)):
        print(f"{title}: " + "; ".join(f"{name} {count}" for name, count in sorted(counter.items())))


if __name__ == "__main__":
    main()
