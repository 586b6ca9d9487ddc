"""1 for a response that is the answer and nothing else."""

from __future__ import annotations

from lightrl.records import Sample
from lightrl.rewards.expected import expected_answer


def exact_match(sample: Sample) -> float:
    """Whether the response, without the white space around it, equals the answer as text."""
    return float(sample.text.strip() == expected_answer(sample))
