"""Measures the time until a model solves a given share of held-out problems, with lightrl and with TRL.

    pip install "lightrl[reasoning-gym]" trl==1.16.0
    python benchmarks/records.py --write            # benchmarks/records.md; a record that is broken replaces the line

Each task is a recipe of configs/ with its settings and model (the comment in its file has the commands that make the
model; a task whose model is missing is left out). trl_side.py has TRL's settings. One process and one thread. Both
sides sample one answer to each held-out problem at temperature 1 every ten steps; these evaluations are not counted,
nor is the start up to the first step. Of three seeds the middle one counts.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench import processor

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "records.md"
EVERY, MOST_STEPS = 10, 400
SEEDS = (0, 1, 2)


class Task(NamedTuple):
    """A recipe, and the accuracy that ends the run."""

    recipe: str
    goal: float


TASKS = (
    Task("quickstart", 0.9),
    Task("products", 0.9),
    Task("spell_backward", 0.9),
    Task("chain_sum", 0.75),
)


class Reached(Exception):  # noqa: N818 (it is good news)
    """The goal is reached, which ends the run."""


class Stopwatch:
    """Counts wall and CPU seconds but for those of evaluations, and steps."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.wall = self.cpu = 0.0
        self.steps = 0
        self.accuracies: list[float] = []
        self._since: tuple[float, float] | None = None

    def evaluate(self, measure: Callable[[], float]) -> None:
        """Stops, evaluates and goes on; raises Reached at the goal."""
        now = time.perf_counter(), time.process_time()
        if self._since is not None:
            self.wall += now[0] - self._since[0]
            self.cpu += now[1] - self._since[1]
        self.accuracies.append(measure())
        if self.accuracies[-1] >= self.goal:
            raise Reached
        self._since = time.perf_counter(), time.process_time()

    def result(self) -> dict[str, Any]:
        return {
            "seconds": self.wall,
            "cpu": self.cpu,
            "steps": self.steps,
            "before": self.accuracies[0],
            "after": self.accuracies[-1],
            "reached": self.accuracies[-1] >= self.goal,
        }


def config_of(recipe: str, seed: int, folder: str) -> Any:
    from lightrl.config import GRPOConfig, parse_config

    flags = ["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--output_dir", folder, "--strategy", "single"]
    flags += [
        "--seed",
        str(seed),
        "--max_steps",
        str(MOST_STEPS),
        "--eval.every",
        str(EVERY),
        "--checkpoint.every",
        "0",
    ]
    return parse_config(GRPOConfig, [*flags, "--log.tensorboard", "False"])


def run_lightrl(task: Task, seed: int, folder: str) -> dict[str, Any]:
    from lightrl.trainers.fit import build_trainer
    from lightrl.trainers.grpo import GRPOTrainer

    watch = Stopwatch(task.goal)

    class Timed(GRPOTrainer):
        def step(self) -> Any:
            watch.steps += 1
            return super().step()

        def evaluate(self) -> dict[str, float]:
            metrics: dict[str, float] = {}

            def measure() -> float:
                metrics.update(super(Timed, self).evaluate())
                return metrics["eval/accuracy"]

            watch.evaluate(measure)
            return metrics

    with contextlib.suppress(Reached):
        build_trainer(Timed, config_of(task.recipe, seed, folder)).fit()
    return watch.result()


def run_trl(task: Task, seed: int, folder: str) -> dict[str, Any]:
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl_side import trl_trainer

    from lightrl.builtin.model import builtin_model_path
    from lightrl.data.prompts import build_prompts, held_out_of, load_records
    from lightrl.records import Sample
    from lightrl.rewards import load_reward, score

    config = config_of(task.recipe, seed, folder)
    model = str(builtin_model_path()) if config.model.startswith("builtin:") else config.model
    tokenizer = AutoTokenizer.from_pretrained(model)
    judge = load_reward(config.reward[0] if isinstance(config.reward, tuple) else config.reward)
    watch = Stopwatch(task.goal)

    def prompts_of(source: str) -> list[Any]:
        return build_prompts(load_records(source), tokenizer, max_prompt_tokens=512)

    def scores(prompts: list[Any], texts: list[str]) -> list[float]:
        samples = [
            Sample(
                prompt=prompt, position=0, sample_index=0, response_ids=(), sampler_logprobs=(), versions=(),
                finish_reason="stop", text=text,
            )
            for prompt, text in zip(prompts, texts, strict=True)
        ]  # fmt: skip
        return score(judge, samples)

    training = prompts_of(config.train_data)
    held_out = prompts_of(config.eval_data or held_out_of(config.train_data))
    by_index = {prompt.index: prompt for prompt in training}

    def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
        return scores([by_index[i] for i in index], completions)

    @torch.no_grad()
    def accuracy() -> float:
        trained = trainer.model.eval()
        encoded = tokenizer(
            [prompt.text for prompt in held_out], return_tensors="pt", padding=True, padding_side="left"
        )
        length = encoded["input_ids"].shape[1]
        made = trained.generate(
            **encoded, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=config.max_new_tokens
        )
        trained.train()
        found = scores(held_out, tokenizer.batch_decode(made[:, length:], skip_special_tokens=True))
        return sum(value >= 1 for value in found) / len(found)

    class Timer(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 0:
                watch.evaluate(accuracy)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            watch.steps += 1
            if state.global_step % EVERY == 0:
                watch.evaluate(accuracy)

    trainer = trl_trainer(
        model,
        [{"prompt": prompt.text, "index": prompt.index} for prompt in training],
        reward,
        Timer(),
        num_steps=MOST_STEPS,
        num_prompts=config.num_prompts,
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        lr=config.lr,
        seed=seed,
    )
    with contextlib.suppress(Reached):
        trainer.train()
    return watch.result()


def in_a_process(system: str, task: Task, seed: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", system, "--tasks", task.recipe, "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def middle_run(system: str, task: Task) -> dict[str, Any]:
    """Returns the run of the middle one of three seeds, by CPU seconds: by chance a goal is reached early or late."""
    runs = [in_a_process(system, task, seed) for seed in SEEDS]
    return sorted(runs, key=lambda found: (not found["reached"], found["cpu"]))[len(runs) // 2]


def row_of(task: Task, system: str, version: str, found: dict[str, Any]) -> str:
    reached = f"{task.goal:g}" if found["reached"] else f"{task.goal:g} not reached: {found['after']:.3f}"
    cells = [
        task.recipe,
        reached,
        system,
        version,
        str(found["steps"]),
        f"{found['seconds']:.1f}",
        f"{found['cpu']:.1f}",
    ]
    return f"| {' | '.join([*cells, datetime.date.today().isoformat(), processor()])} |"


def versions() -> dict[str, str]:
    import torch
    import transformers
    import trl

    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    shared = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    return {"lightrl": f"{commit}, {shared}", "trl": f"{trl.__version__}, {shared}"}


def keep_best(text: str, row: str) -> str:
    """Returns the page with a row in its table, unless the one of the same task and side took fewer CPU seconds."""
    cells = row.split("|")
    for line in text.splitlines():
        known = line.split("|")
        if len(known) == len(cells) and (known[1], known[3]) == (cells[1], cells[3]):
            faster = "not reached" not in row and ("not reached" in line or float(cells[7]) < float(known[7]))
            return text.replace(line, row) if faster else text
    return f"{text.rstrip()}\n{row}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=[task.recipe for task in TASKS],
        default=None,
        help="recipes to time (default: all)",
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=["lightrl", "trl"],
        default=["lightrl", "trl"],
        help="sides to time (default: both)",
    )
    parser.add_argument("--write", action="store_true", help="keep what is faster in benchmarks/records.md")
    parser.add_argument("--child", choices=["lightrl", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = [task for task in TASKS if args.tasks is None or task.recipe in args.tasks]
    if args.child:
        with tempfile.TemporaryDirectory() as folder:
            result = {"lightrl": run_lightrl, "trl": run_trl}[args.child](chosen[0], args.seed, folder)
        print(json.dumps(result))
        return
    version = versions()
    for task in chosen:
        if not Path("runs", task.recipe).exists() and task.recipe != "quickstart":
            print(f"{task.recipe}: left out, configs/{task.recipe}.yaml says how its model is made")
            continue
        for system in args.systems:
            row = row_of(task, system, version[system], middle_run(system, task))
            print(row, flush=True)
            if args.write:
                TABLE.write_text(keep_best(TABLE.read_text(), row))


if __name__ == "__main__":
    main()
