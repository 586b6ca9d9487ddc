"""The answer that a prompt's record gives, for the rewards that compare with one."""

from __future__ import annotations

from lightrl.records import Sample


def expected_answer(sample: Sample) -> str:
    """The prompt's answer as text, stripped; a ValueError if it has none, since a reward of 0 would hide that."""
    answer = sample.prompt.answer
    if answer is None or not str(answer).strip():
        raise ValueError(
            "the prompt has no answer to compare with. Name the field that holds it by --data.answer_field"
        )
    return str(answer).strip()
