"""The program `lightrl lm-eval`: runs tasks of EleutherAI's lm-evaluation-harness on a Hugging Face folder."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrl.config import exit_with_user_error, print_text
from lightrl.config.paths import why_no_output
from lightrl.imports import import_extra


def main(arguments: Sequence[str]) -> int:
    """Prints the results as JSON; exits with code 2 for an unknown task or a folder without a model."""
    asked = _parser().parse_args(arguments)
    try:
        text = json.dumps(_results(asked), indent=2, default=str)
        print_text(text)  # first, as it may have taken hours to find
        if asked.output:
            Path(asked.output).write_text(f"{text}\n")
    except (ImportError, ValueError, OSError) as error:
        exit_with_user_error(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightrl lm-eval",
        description="Evaluate a model on tasks of lm-evaluation-harness, in this process, with transformers.",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder, such as RUN/final, or a name on the hub")
    parser.add_argument("--tasks", required=True, metavar="NAME,NAME", help="tasks or groups of the harness, or yours")
    parser.add_argument("--include_path", metavar="DIR", help="folder with tasks of your own (YAML); their code is run")
    parser.add_argument("--num_fewshot", type=_count, help="examples before each question (default: the task's)")
    parser.add_argument("--limit", type=_count, help="number of questions per task (default: all)")
    parser.add_argument("--batch_size", default="1", help="questions at a time, or auto (default: 1)")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    parser.add_argument("--chat", action="store_true", help="put each question into the model's chat template")
    parser.add_argument("--output", metavar="FILE", help="also write the results to this file")
    return parser


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def _results(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the harness's results by task, and the versions and settings that they depend on."""
    if asked.include_path and not os.path.isdir(asked.include_path):
        raise ValueError(f"--include_path {asked.include_path} is not a folder.")
    if asked.output and (problem := why_no_output(asked.output)):
        raise ValueError(f"--output {asked.output}: {problem}. Name another file.")
    harness = import_extra("lm_eval", extra="lm-eval", needed_by="lightrl lm-eval")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=asked.include_path)
    tasks = [name for name in asked.tasks.split(",") if name]
    _check_tasks(tasks, set(manager.all_tasks))
    if os.path.isdir(asked.model) and not Path(asked.model, "config.json").is_file():
        raise ValueError(f"{asked.model} has no config.json: give the folder of a model, such as RUN/final.")
    found = harness.simple_evaluate(
        model="hf",
        model_args={"pretrained": asked.model, "trust_remote_code": False},
        tasks=tasks,
        task_manager=manager,
        num_fewshot=asked.num_fewshot,
        batch_size=asked.batch_size,
        device=asked.device,
        limit=asked.limit,
        apply_chat_template=asked.chat,
        log_samples=False,
    )
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
    return {
        "model": asked.model,
        "lm_eval": harness.__version__,
        **{name: found[name] for name in kept if found.get(name)},
    }


def _check_tasks(tasks: Sequence[str], known: set[str]) -> None:
    """Refuses unknown tasks by name, before a model is loaded."""
    if not tasks:
        raise ValueError("--tasks names no task.")
    for name in tasks:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)  # not all tasks: there are thousands
            hint = f"Did you mean {' or '.join(close)}? " if close else ""
            raise ValueError(f"--tasks {name}: there is no such task. {hint}Yours are found by --include_path.")
