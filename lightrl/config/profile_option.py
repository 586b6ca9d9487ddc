"""The option that records where the time of a run goes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightrl.config.options import option


@dataclass(kw_only=True)
class ProfileConfig:
    """What is recorded of the time that a run takes."""

    __slots__ = ()

    profile: str = option("", resume="free")
    """Record where the time goes, in profile/ of the run's folder: timeline for the phases of every rank in
    timeline.json, or a step (3) or steps (3-5) for a trace of torch's profiler too, and on a GPU a snapshot of its
    memory. https://ui.perfetto.dev opens these traces. Empty: nothing."""

    @property
    def observers(self) -> tuple[str, ...]:
        """Import paths of functions of the trainer that look on while it trains; none by default."""
        return ("lightrl.trainers.profiling:profile",) if self.profile else ()

    def check(self) -> None:
        """Raises ValueError for a profile that names no steps."""
        if self.profile:
            profiled_steps(self.profile)


def profiled_steps(text: str) -> range:
    """Returns the steps of --profile, counted from 1 as in metrics.jsonl; none for the word timeline."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    steps = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if text != "timeline" and (not steps or steps[0] < 1):
        raise ValueError(f"--profile is {text!r}: give a step such as 3, steps such as 3-5, or the word timeline.")
    return steps
