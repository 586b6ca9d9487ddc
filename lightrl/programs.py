"""The programs of lightrl by name, for scripts/, for `lightrl NAME` and for `torchrun -m lightrl.train NAME`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import NamedTuple

from lightrl.last_error import exit_interrupted

try:
    from lightrl.config import (
        DPOConfig,
        EvaluateConfig,
        GRPOConfig,
        PPOConfig,
        RMConfig,
        RunConfig,
        SFTConfig,
        exit_with_user_error,
        nearest_name,
        parse_config,
        print_text,
    )
except KeyboardInterrupt:  # start() handles a later one; this import takes longest
    exit_interrupted()


class Run(NamedTuple):
    """A program whose arguments are the options of a config."""

    summary: str
    config: type[RunConfig]
    trainer: str  # import path: loading it loads torch


class Command(NamedTuple):
    """A program that reads its arguments itself."""

    summary: str
    start: str  # import path of a function that takes the arguments and may return an exit code


TRAINERS = {
    "grpo": Run("Train by GRPO or a related algorithm.", GRPOConfig, "lightrl.trainers.grpo:GRPOTrainer"),
    "ppo": Run("Train by PPO with a critic.", PPOConfig, "lightrl.trainers.ppo:PPOTrainer"),
    "sft": Run("Train on responses.", SFTConfig, "lightrl.trainers.sft:SFTTrainer"),
    "rm": Run("Train a reward model on pairs of responses.", RMConfig, "lightrl.trainers.reward_model:RMTrainer"),
    "dpo": Run("Train by DPO on pairs of responses.", DPOConfig, "lightrl.trainers.dpo:DPOTrainer"),
}
COMMANDS: dict[str, Run | Command] = {
    "train": Command(f"Train: lightrl train {'|'.join(TRAINERS)} [OPTIONS].", "lightrl.programs:train"),
    "plan": Command(
        f"Say how much memory a run needs before it starts: lightrl plan {'|'.join(TRAINERS)}.", "lightrl.programs:plan"
    ),
    "evaluate": Run("Evaluate a model on its responses.", EvaluateConfig, "lightrl.trainers.evaluation:Evaluator"),
    "lm-eval": Command(
        "Evaluate a Hugging Face folder on tasks of lm-evaluation-harness.", "lightrl.trainers.harness_run:main"
    ),
    "replay": Command(
        "Repeat a recorded asynchronous run, or one step of a GRPO or PPO run.",
        "lightrl.trainers.recorded_run:replay",
    ),
    "hash": Command("Recompute the hashes of a run's saved weights.", "lightrl.trainers.hash_run:main"),
    "doctor": Command("Check this machine, or all ranks under torchrun, before a run.", "lightrl.doctor.report:main"),
    "report": Command(
        "Write one HTML file about runs, or watch a run: lightrl report RUN...", "lightrl.report.program:main"
    ),
    "export": Command(
        "Write the model of a run, or of a checkpoint, as a Hugging Face folder.", "lightrl.trainers.export_run:main"
    ),
    "completion": Command(
        "Print a script for bash or zsh that completes commands and options.", "lightrl.shell_completion:main"
    ),
}


def train(arguments: Sequence[str], program: str = "lightrl train") -> None:
    """Runs the trainer that the first argument names, with the options that follow."""
    _start_named(TRAINERS, arguments, program)


def plan(arguments: Sequence[str]) -> int:
    """Plans the run of the trainer that the first argument names, without starting it."""
    configs = {name: program.config for name, program in TRAINERS.items()}
    return int(resolve_name("lightrl.plan.command:plan")(configs, arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names; the console script `lightrl`."""
    words = sys.argv[1:] if arguments is None else arguments
    if list(words[:1]) == ["--version"]:
        print_text(f"lightrl {importlib.import_module('lightrl').__version__}")
        return 0
    return _start_named(COMMANDS, words, "lightrl")


def start(name: str, arguments: Sequence[str] | None = None, program: str = "") -> int:
    """Runs a program of this name and returns its exit code; without arguments, with those of the process.

    program: what the user typed in front of the arguments, for the help; empty for the name of the script.
    """
    chosen = {**TRAINERS, **COMMANDS}[name]
    try:
        if isinstance(chosen, Command):
            return int(resolve_name(chosen.start)(sys.argv[1:] if arguments is None else arguments) or 0)
        config = parse_config(chosen.config, arguments, program)  # before torch is loaded: mistakes are found at once
        if config.dry_run:
            raise SystemExit(resolve_name("lightrl.plan.plan_program:dry_run")(config))
        resolve_name("lightrl.trainers.fit:run_trainer")(resolve_name(chosen.trainer), config)
    except KeyboardInterrupt:  # while modules are imported, or in a command; a run handles it itself
        exit_interrupted()
    return 0


def _start_named(known: Mapping[str, Run | Command], arguments: Sequence[str], program: str) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", ())
    if name in ("-h", "--help"):
        print_text(_list_of(known, program))
        return 0
    if name not in known:
        hint = nearest_name(name, set(known))
        exit_with_user_error(ValueError(f"{program} {name}: there is no such command. {hint}"))
    return start(name, rest, f"{program} {name}")


def _list_of(known: Mapping[str, Run | Command], program: str) -> str:
    lines = [f"usage: {program} NAME [ARGUMENTS]", ""]
    lines += [f"  {name:12}{kind.summary}" for name, kind in known.items()]
    lines += ["", f"{program} NAME --help explains a command."]
    lines += ["On several ranks: torchrun --nproc_per_node N -m lightrl.train NAME [OPTIONS]."]
    return "\n".join(lines)
