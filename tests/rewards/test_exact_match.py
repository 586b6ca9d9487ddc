from __future__ import annotations

from typing import Any

import pytest

from lightrl.records import Prompt, Sample
from lightrl.rewards.exact_match import exact_match


def answered(text: str, answer: Any) -> Sample:
    return Sample(
        prompt=Prompt(index=0, text="", token_ids=(1,), answer=answer),
        position=0,
        sample_index=0,
        response_ids=(),
        sampler_logprobs=(),
        versions=(),
        finish_reason="stop",
        text=text,
    )


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("42", "42", 1.0),
        (" 42\n", 42, 1.0),
        ("42", "42\n", 1.0),
        ("42.", "42", 0.0),
        ("the 42", "42", 0.0),
        ("", "42", 0.0),
        ("Blue", "blue", 0.0),
        ("0", 0, 1.0),
    ],
)
def test_only_the_whole_answer_counts(text: str, answer: Any, reward: float) -> None:
    assert exact_match(answered(text, answer)) == reward


@pytest.mark.parametrize("answer", [None, "", " "])
def test_a_prompt_without_an_answer_is_refused(answer: Any) -> None:
    with pytest.raises(
        ValueError, match="has no answer to compare with. Name the field that holds it by --data.answer_field"
    ):
        exact_match(answered("None", answer))
