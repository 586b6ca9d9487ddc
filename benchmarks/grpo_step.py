"""Compares time and memory of a whole GRPO step with TRL's GRPOTrainer, in turn, in one run.

pip install trl==1.16.0     (and once more with 1.14.2: since 1.15 TRL scores prompts and padding too on a CPU)
python benchmarks/grpo_step.py --steps 40 --rounds 3 --threads 1
python benchmarks/grpo_step.py --task equal --steps 4 --rounds 2 --threads 1
python benchmarks/grpo_step.py --task tail --steps 6 --rounds 2 --threads 1
python benchmarks/grpo_step.py --ranks 2 --threads 1      (ddp on both sides; the figures are those of rank 0)

addition: the built-in task and model, 16 prompts x 16 samples of at most 8 tokens. equal: a random model of 42 million
parameters with a vocabulary of 32,000, 8 prompts of 64 tokens x 8 samples of 64 (it hardly ever draws the end token).
tail: a random model of 0.8 million parameters with a vocabulary of 64, 8 prompts of 64 tokens x 8 samples of at most
512; each token ends a sample with a probability of about 1 in 64, so lengths are geometric. tail_mid: the same with the
layers of "equal". The settings are in trl_side.py. A step lasts from its start to the start of the next; the first is
not counted. For lightrl it includes the weight sync to the engine, and the metrics and samples files. "whole" is
lightrl with --share_prompts False; by default it computes prompts once on a CPU, for which TRL has no counterpart.
"kernels" is lightrl with --native.cpu_kernels True, which needs a C compiler.
Memory is the peak of the process and, at its end, the PSS and the anonymous part, which leaves out mapped files, whose
pages ranks share. Most of the peak of a small run is libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

LEARNING_RATE = 1e-4
OUTPUT = "GRPO_STEP_OUTPUT"  # the folder of lightrl's run, which all ranks have to share
PROMPT_LENGTH = 64  # words, of the random models
RANDOM = {"equal": ("mid", 32_000, 64), "tail": ("toy", 64, 512), "tail_mid": ("mid", 64, 512)}  # shape, words, longest


class Task(NamedTuple):
    """What both sides train."""

    model: str
    records: list[dict[str, Any]]
    num_prompts: int
    group_size: int
    max_new_tokens: int


class Clock:
    """Wall and CPU seconds between the starts of steps."""

    def __init__(self) -> None:
        self.starts: list[tuple[float, float]] = []

    def start_step(self) -> None:
        self.starts.append((time.perf_counter(), time.process_time()))

    def steps(self) -> dict[str, float]:
        """Returns the medians; the first step pays for warming up."""
        pairs = list(itertools.pairwise(self.starts[1:]))
        wall, cpu = ([after[i] - before[i] for before, after in pairs] for i in (0, 1))
        return {"seconds": statistics.median(wall), "cpu": statistics.median(cpu)}


def make_task(name: str, folder: Path) -> Task:
    if name == "addition":
        from lightrl.builtin.model import builtin_model_path
        from lightrl.builtin.task import train_problems

        return Task(str(builtin_model_path()), train_problems(), 16, 16, 8)
    shape, num_words, longest = RANDOM[name]
    return Task(*random_model_and_prompts(folder, shape, num_words), 8, 8, longest)


def random_model_and_prompts(folder: Path, shape: str, num_words: int) -> tuple[str, list[dict[str, Any]]]:
    """Makes a model whose tokens are words such as w17, and prompts of PROMPT_LENGTH words."""
    import torch
    from decode import random_model
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{index}": index for index in range(num_words)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = random_model(shape, vocab_size=num_words)
    model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id = 0, 1, None
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
    drawn = torch.randint(2, num_words, (256, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
    prompts = [" ".join(f"w{token}" for token in row) for row in drawn.tolist()]
    return str(folder), [{"prompt": prompt, "answer": ""} for prompt in prompts]


def score(text: str, answer: str) -> float:
    """Returns 1 for the answer or, where there is none, the share of words with an even number."""
    if answer:
        return float(text.strip() == answer)
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


def run_lightrl(
    task: Task, num_steps: int, folder: Path, *, shares: bool = True, kernels: bool = False
) -> dict[str, Any]:
    from lightrl.config import CheckpointConfig, EvalConfig, GRPOConfig, NativeEngineConfig
    from lightrl.sharing.model import share_by_itself
    from lightrl.trainers.grpo import GRPOTrainer

    clock = Clock()

    class Timed(GRPOTrainer):
        def step(self) -> Any:
            clock.start_step()
            return super().step()

    written, data = folder / "data.jsonl", shared_folder() / "data.jsonl"
    written.write_text("".join(json.dumps(record) + "\n" for record in task.records))
    shutil.move(written, data)
    config = GRPOConfig(
        strategy="ddp" if num_ranks() > 1 else "single",
        model=task.model,
        train_data=str(data),
        max_steps=num_steps,
        num_prompts=task.num_prompts,
        group_size=task.group_size,
        max_new_tokens=task.max_new_tokens,
        lr=LEARNING_RATE,
        output_dir=os.environ[OUTPUT],
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
        share_prompts="auto" if shares else False,
        native=NativeEngineConfig(cpu_kernels=kernels),
    )
    trainer = Timed(config, reward=lambda sample: score(sample.text, sample.prompt.answer))
    if shares:
        share_by_itself(trainer)  # as build_trainer(), which takes a trainer without further arguments
    trainer.fit()
    clock.start_step()
    rows = trainer.folder.metrics()
    phases = [{k: v for k, v in row.items() if k.startswith("time/")} for row in rows[1:]]
    middle = {name: statistics.median(phase[name] for phase in phases) for name in phases[0]}
    return {**clock.steps(), "rewards": [row["reward/mean"] for row in rows], "phases": middle}


def num_ranks() -> int:
    """Returns the number of ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def run_trl(task: Task, num_steps: int, _: Path) -> dict[str, Any]:
    from transformers import TrainerCallback
    from trl_side import trl_trainer

    clock = Clock()

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.start_step()

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [score(text, wanted) for text, wanted in zip(completions, answer, strict=True)]

    trainer = trl_trainer(
        task.model,
        task.records,
        reward,
        Timer(),
        num_steps=num_steps,
        num_prompts=task.num_prompts,
        num_ranks=num_ranks(),
        group_size=task.group_size,
        max_new_tokens=task.max_new_tokens,
        lr=LEARNING_RATE,
    )
    trainer.train()
    clock.start_step()
    return {**clock.steps(), "rewards": [row["reward"] for row in trainer.state.log_history if "reward" in row]}


SYSTEMS: dict[str, Callable[[Task, int, Path], dict[str, Any]]] = {
    "lightrl": run_lightrl,
    "whole": partial(run_lightrl, shares=False),
    "kernels": partial(run_lightrl, kernels=True),
    "trl": run_trl,
}


def run_child(system: str, task: str, num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = make_task(task, folder / "model")
        if task in RANDOM:
            made = made._replace(model=share(folder / "model"))
        result = SYSTEMS[system](made, num_steps, folder)
    return {**result, **memory()}


def shared_folder() -> Path:
    """Returns a folder that all ranks see under one path, as their options must be equal."""
    return Path(os.environ[OUTPUT]).parent


def share(model: Path) -> str:
    """Moves a model into the shared folder, unless another rank was faster."""
    with contextlib.suppress(OSError):  # the folder is there and not empty
        model.rename(shared_folder() / "model")
    return str(shared_folder() / "model")


def memory() -> dict[str, float]:
    """Returns GB of this process: its peak, and now its PSS and what is of no mapped file. Linux only."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name: int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"gb": peak * 1.024e-6, "pss": kilobytes["Pss"] * 1.024e-6, "own": kilobytes["Anonymous"] * 1.024e-6}


def in_a_process(system: str, args: argparse.Namespace) -> dict[str, Any]:
    options = ["--child", system, "--steps", str(args.steps), "--task", args.task]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    command = [sys.executable, *(launcher if args.ranks > 1 else []), __file__, *options]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), OUTPUT: f"{folder}/run"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    (found,) = (line for line in done.stdout.splitlines() if line.startswith('{"seconds"'))
    result: dict[str, Any] = json.loads(found)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task", choices=["addition", *RANDOM], default="addition", help="data and model (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of a run (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of ddp, on both sides (default: %(default)s)")
    parser.add_argument("--child", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        result = run_child(args.child, args.task, args.steps)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(result))
        return
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("This compares with TRL: pip install trl==1.16.0 first.")
    from trl import __version__ as trl_version

    found: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for turn in range(args.rounds):
        for system, results in found.items():
            results.append(result := in_a_process(system, args))
            rewards = result["rewards"]
            tenth = max(1, len(rewards) // 10)
            first, last = statistics.mean(rewards[:tenth]), statistics.mean(rewards[-tenth:])
            print(
                f"round {turn + 1} {system:8s} step {result['seconds'] * 1e3:7.1f} ms, "
                f"CPU {result['cpu'] * 1e3:7.1f} ms, peak {result['gb']:.2f} GB "
                f"(PSS {result['pss']:.2f}, anonymous {result['own']:.2f}), reward {first:.2f} -> {last:.2f} ",
                *(f"{name[5:]} {seconds * 1e3:.1f}" for name, seconds in result.get("phases", {}).items()),
                flush=True,
            )
    setting = f"{args.ranks} rank(s) x {args.threads} thread(s), {args.rounds} rounds of {args.steps} steps"
    print(f"{args.task}, {setting}, TRL {trl_version}")
    for system in ("lightrl", "whole", "kernels"):
        time_, cpu, peak, own = (
            statistics.median(
                theirs[unit] / ours[unit] for ours, theirs in zip(found[system], found["trl"], strict=True)
            )
            for unit in ("seconds", "cpu", "gb", "own")
        )
        print(f"TRL / {system}: {time_:.2f}x time, {cpu:.2f}x CPU time, {peak:.2f}x memory ({own:.2f}x anonymous)")


if __name__ == "__main__":
    main()
