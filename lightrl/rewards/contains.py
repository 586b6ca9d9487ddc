"""1 for a response that has the answer somewhere in it."""

from __future__ import annotations

from lightrl.records import Sample
from lightrl.rewards.expected import expected_answer


def contains(sample: Sample) -> float:
    """Whether the answer's text stands anywhere in the response, inside a longer word or number too."""
    return float(expected_answer(sample) in sample.text)
