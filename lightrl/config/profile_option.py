"""The steps that the option --profile names."""

from __future__ import annotations

import re


def profiled_steps(text: str) -> range:
    """Returns the steps of --profile, counted from 1 as in metrics.jsonl; none for the word timeline."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    steps = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if text != "timeline" and (not steps or steps[0] < 1):
        raise ValueError(f"--profile is {text!r}: give a step such as 3, steps such as 3-5, or the word timeline.")
    return steps
