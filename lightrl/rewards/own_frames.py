"""Shortens the traceback of a reward that ended the run to the frames of the user's code."""

from __future__ import annotations

import traceback
from pathlib import Path

from lightrl.rewards.scoring import RewardError

_PACKAGE = Path(__file__).resolve().parents[1]


def explain(error: RewardError) -> str:
    """Returns the error, preceded by the traceback of its cause without the frames of lightrl."""
    lines = []
    if error.__cause__ is not None:
        cause = traceback.TracebackException.from_exception(error.__cause__, compact=True)
        own = [frame for frame in cause.stack if not Path(frame.filename).resolve().is_relative_to(_PACKAGE)]
        if own:
            lines = ["Traceback (most recent call last):\n", *traceback.format_list(own)]
            lines += traceback.format_exception_only(error.__cause__)
    return f"{''.join(lines)}error: {error} To go on without such rewards, allow some by --max_reward_failures."
