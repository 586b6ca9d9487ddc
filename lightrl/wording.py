"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 step, 2 steps."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
