"""A user-defined reward: --reward examples/digit_reward.py:digit_reward"""

from __future__ import annotations

from lightrl import Sample


def digit_reward(sample: Sample) -> float:
    """Returns the fraction of characters that equal those of the answer: for 127, a 128 earns 2/3, and 127 earns 1."""
    answer, response = str(sample.prompt.answer), sample.text.strip()
    right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    return right / max(len(answer), len(response))
