"""The steps that the option --profile names."""

from __future__ import annotations

import re
from typing import Protocol


class _Profiled(Protocol):
    profile: str
    max_steps: int


def check_profile(config: _Profiled) -> None:
    """Raises ValueError if --profile names no steps, or only steps after the last one."""
    steps = profiled_steps(config.profile)
    last = config.max_steps
    if steps and last and steps[0] > last:  # max_steps 0: the data decide, which are not known yet
        raise ValueError(
            f"--profile {config.profile} begins after the last step, --max_steps {last}. Give steps from 1 to {last}."
        )


def profiled_steps(text: str) -> range:
    """Returns the steps of --profile, counted from 1 as in metrics.jsonl; none for the word timeline."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    steps = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if text != "timeline" and (not steps or steps[0] < 1):
        raise ValueError(f"--profile is {text!r}: give a step such as 3, steps such as 3-5, or the word timeline.")
    return steps
