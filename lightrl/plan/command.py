"""The command line of `lightrl plan`: its options and its help, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from lightrl.config import exit_with_user_error, option, option_names, parse_config, print_text
from lightrl.config.help import whole_help

_HELP = ("-h", "--help", "--help-all")


@dataclass(kw_only=True)
class PlanConfig:
    """Say how much memory a run needs and whether it fits, from the options of its trainer and those below.

    Only the model's config.json is read, and adapter_config.json of --lora.others. The exit code is 0 if the run fits,
    else 1.
    """

    ranks: int = option(0, at_least=0)
    """Number of ranks. 0: those that torchrun started, or 1."""
    device_memory: str = ""
    """Memory of a device, such as 24GB or 80GiB. Empty: that of this machine's GPU, if it has one."""
    prompt_tokens: int = option(256, at_least=1)
    """Tokens of a prompt. The data is not read."""
    response_tokens: int = option(0, at_least=0)
    """Tokens of a response. 0: --max_new_tokens, or 512 for sft, rm and dpo."""
    fit: bool = False
    """Choose options with which the run fits, and print them."""
    json: bool = False
    """Print the plan as JSON, with all sizes in bytes."""


def plan(trainers: Any, arguments: Sequence[str]) -> int:
    """Plans a run of the trainer that the first argument names; returns the exit code.

    trainers: the trainers' config classes by name.
    """
    name, words = (arguments[0], list(arguments[1:])) if arguments else ("--help", [])
    if name in _HELP:
        return _print_help("|".join(trainers))
    if name not in trainers:
        told = f"lightrl plan {name}: choose one of {', '.join(trainers)}, such as lightrl plan grpo."
        exit_with_user_error(ValueError(told))
    if words and words[-1] in _HELP:
        return _print_help(name)
    own, rest = _split(words)
    config = parse_config(trainers[name], rest, f"lightrl plan {name}")
    asked = parse_config(PlanConfig, own, f"lightrl plan {name}")
    return int(resolve_name("lightrl.plan.plan_program:plan_of")(config, asked, name))  # which loads torch


def _print_help(name: str) -> int:
    print_text(
        f"{whole_help(PlanConfig, f'lightrl plan {name} [OPTIONS OF THE TRAINER]')}\n\n"
        f"lightrl train {name} --help explains the options of the trainer."
    )
    return 0


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into the options of the plan and those of the trainer."""
    own: list[str] = []
    rest: list[str] = []
    names = {f"__{name}" for name in option_names(PlanConfig)}
    target = rest
    for word in words:
        if word.startswith("--"):
            target = own if word.partition("=")[0].replace("-", "_") in names else rest
        target.append(word)
    return own, rest
