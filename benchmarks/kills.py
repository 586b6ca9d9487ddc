"""Kills scheduled runs with SIGKILL, resumes them, and compares them with undisturbed runs.

python benchmarks/kills.py --worlds 1 2 3 --kills 2

With a learning rate of 0, all runs of a schedule must have the same tokens, versions and rewards on any number of
ranks; with a rate above 0, runs with the same number of ranks must. There is a line for each killed run; the command
fails if one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightrl.builtin.model import tiny_model
from lightrl.testing import run_spmd

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_grpo.py"
AGENT = ("--rollout.workflow_args", "agent=examples.openai_agent:play")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "partial": (),
    "from the prompt": ("--rollout.partial", "False"),
    "tail batches": ("--rollout.tail_batch", "1", "--rollout.tail_after", "1"),
    "curriculum": ("--data.curriculum", "half_solved", "--rollout.filter", "unequal_rewards"),
    "agents": ("--rollout.workflow", "agent", *AGENT, "--rollout.turn_wait_s", "60", "--max_new_tokens", "6"),
}
REWARD = '''
import json, os, signal
from pathlib import Path

FOLDER, KILLED_AT, RANK = Path({folder!r}), {killed_at}, os.environ.get("RANK", "0")
SEEN = []

def odd(sample):
    """The share of odd digits; each sample is written down, and one kills the last rank."""
    line = [sample.ticket, sample.sample_index, sample.response_ids, sample.versions]
    with open(FOLDER / f"samples-{{RANK}}-{{os.getpid()}}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
    SEEN.append(sample)
    marker = FOLDER / "killed"
    if len(SEEN) == KILLED_AT and RANK == str(int(os.environ.get("WORLD_SIZE", "1")) - 1) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(character in "13579" for character in sample.text) / 8
'''


def make_model(folder: Path) -> list[str]:
    """Writes a tiny model and its prompts; returns the flags of a run of six steps on them."""
    model, tokenizer = tiny_model()
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")  # type: ignore[union-attr]
    lines = [json.dumps({"prompt": f"{number}+{number}=", "answer": str(2 * number)}) for number in range(11)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    flags = ["--model", str(folder / "model"), "--train_data", str(folder / "train.jsonl"), "--num_prompts", "4"]
    flags += ["--group_size", "3", "--max_new_tokens", "24", "--max_steps", "6", "--eval.every", "0"]
    flags += ["--log.tensorboard", "False", "--checkpoint.every", "1", "--rollout.over_issue", "1"]
    return [*flags, "--rollout.max_staleness", "3", "--rollout.agree_every", "3"]


def digest_of(flags: Sequence[str], folder: Path, world: int, killed_at: int = 0) -> str:
    """Runs to the end, through a kill if killed_at is above 0; returns a digest of samples, versions and rewards."""
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD.format(folder=str(folder), killed_at=killed_at))
    flags = [*flags, "--reward", f"{folder / 'reward.py'}:odd", "--output_dir", str(folder / "run")]
    if killed_at:
        run_spmd(SCRIPT, *flags, world_size=world, timeout_s=120, expect_failure=True)
        assert (folder / "killed").exists(), "the run ended before it was killed"
    run_spmd(SCRIPT, *flags, world_size=world, timeout_s=120)
    lines = {line for path in folder.glob("samples-*.jsonl") for line in path.read_text().splitlines()}
    names = {tuple(json.loads(line)[:2]) for line in lines}
    assert len(names) == len(lines), "a sample was made again, and in another way"
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    taken = [(row["step"], row["reward/mean"], row["rollout/carried"], row["rollout/staleness_max"]) for row in steps]
    return hashlib.sha256(json.dumps([sorted(lines), taken]).encode()).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3], help="numbers of ranks (default: 1 2 3)")
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="schedules (default: all)"
    )
    parser.add_argument("--lr", type=float, nargs="+", default=[0.0, 1e-3], help="learning rates (default: 0 0.001)")
    parser.add_argument("--kills", type=int, default=1, help="killed runs of each kind (default: %(default)s)")
    options = parser.parse_args(arguments)
    draw, num_wrong = random.Random(0), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = make_model(folder)
        for schedule in options.schedules:
            for lr in options.lr:
                wanted: dict[int, str] = {}  # by world size, or for all of them
                for world in options.worlds:
                    flags, key = [*base, *SCHEDULES[schedule], "--lr", str(lr)], world if lr else 0
                    if key not in wanted:
                        wanted[key] = digest_of(flags, folder / f"{schedule}-{lr}-{world}", world)
                    for kill in range(options.kills):
                        at = draw.randrange(1, 72 // world - 8)
                        found = digest_of(flags, folder / f"{schedule}-{lr}-{world}-{kill}", world, at)
                        num_wrong += found != wanted[key]
                        verdict = "equal" if found == wanted[key] else "DIFFERENT"
                        print(f"{schedule}, lr {lr:g}, {world} rank(s), killed at sample {at}: {found} {verdict}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
