"""Seconds of a whole GRPO step on the built-in task: lightrl against TRL's GRPOTrainer, in turn, in one run.

pip install trl==1.16.0     (and once more with 1.14.2: since 1.15 TRL scores prompts and padding too on a CPU)
python benchmarks/grpo_step.py --steps 40 --rounds 3 --threads 2

Both: one process, float32, the same model files and prompts, 16 prompts x 16 samples of at most 8 tokens at temperature
1, one update a step, token-mean loss, clip 0.2, group-normalised advantages, no KL, fused AdamW, constant lr 1e-4, norm
clipped at 1, no decay, no logging service, no checkpoint. A step is the time from its start to the start of the next,
from the second on; lightrl's includes the weight sync to its engine and its metrics and samples files.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS, LEARNING_RATE = 16, 16, 8, 1e-4


def step_seconds(starts: list[float]) -> list[float]:
    """The first step pays for warming up."""
    return [after - before for before, after in itertools.pairwise(starts[1:])]


def run_lightrl(num_steps: int) -> dict[str, Any]:
    from lightrl.config import CheckpointConfig, EvalConfig, GRPOConfig
    from lightrl.trainers.grpo import GRPOTrainer

    starts: list[float] = []

    class Timed(GRPOTrainer):
        def step(self) -> Any:
            starts.append(time.perf_counter())
            return super().step()

    config = GRPOConfig(
        strategy="single",
        max_steps=num_steps,
        num_prompts=NUM_PROMPTS,
        group_size=GROUP_SIZE,
        max_new_tokens=MAX_NEW_TOKENS,
        lr=LEARNING_RATE,
        output_dir=tempfile.mkdtemp(),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )
    trainer = Timed(config)
    trainer.fit()
    starts.append(time.perf_counter())
    rewards = [row["reward/mean"] for row in trainer.folder.metrics()]
    phases = [{k: v for k, v in row.items() if k.startswith("time/")} for row in trainer.folder.metrics()[1:]]
    middle = {name: statistics.median(phase[name] for phase in phases) for name in phases[0]}
    return {"seconds": step_seconds(starts), "rewards": rewards, "phases": middle}


def run_trl(num_steps: int) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from lightrl.builtin.model import builtin_model_path
    from lightrl.builtin.task import train_problems
    from lightrl.data.sampler import PromptSampler

    path = str(builtin_model_path())
    starts: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            starts.append(time.perf_counter())

    problems = train_problems()
    sampler = PromptSampler(len(problems), NUM_PROMPTS, 0)
    order = [index for _ in range(num_steps) for index in sampler.next_batch()]
    data = Dataset.from_list([problems[index] for index in order])

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]

    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": NUM_PROMPTS * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": MAX_NEW_TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "num_iterations": 1,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "optim": "adamw_torch_fused",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "shuffle_dataset": False,
        "max_steps": num_steps,
        "disable_tqdm": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(path)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Timer()],
    )
    trainer.train()
    starts.append(time.perf_counter())
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    return {"seconds": step_seconds(starts), "rewards": rewards}


def in_a_process(system: str, num_steps: int, num_threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", system, "--steps", str(num_steps), "--threads", str(num_threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", choices=["lightrl", "trl"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        result = {"lightrl": run_lightrl, "trl": run_trl}[args.child](args.steps)
        print(json.dumps(result))
        return
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("This compares with TRL: pip install trl==1.16.0 first.")
    from trl import __version__ as trl_version

    medians: dict[str, list[float]] = {"lightrl": [], "trl": []}
    for turn in range(args.rounds):
        for system, found in medians.items():
            result = in_a_process(system, args.steps, args.threads)
            found.append(statistics.median(result["seconds"]))
            rewards = result["rewards"]
            tenth = max(1, len(rewards) // 10)
            first, last = statistics.mean(rewards[:tenth]), statistics.mean(rewards[-tenth:])
            print(
                f"round {turn + 1} {system:8s} median step {found[-1] * 1e3:6.1f} ms reward {first:.2f} -> {last:.2f} ",
                *(f"{name[5:]} {seconds * 1e3:.1f}" for name, seconds in result.get("phases", {}).items()),
                flush=True,
            )
    ratios = [theirs / ours for ours, theirs in zip(medians["lightrl"], medians["trl"], strict=True)]
    ours, theirs = (statistics.median(medians[system]) for system in ("lightrl", "trl"))
    print(f"{args.threads} thread(s), median of {args.rounds} rounds of {args.steps} steps, TRL {trl_version}")
    print(f"lightrl {ours * 1e3:.1f} ms   TRL {theirs * 1e3:.1f} ms   ratio {statistics.median(ratios):.2f}x")


if __name__ == "__main__":
    main()
