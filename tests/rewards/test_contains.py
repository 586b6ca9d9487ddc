from __future__ import annotations

from typing import Any

import pytest

from lightrl.records import Prompt, Sample
from lightrl.rewards.contains import contains


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
        ("it is 42, I think", 42, 1.0),
        ("142", "42", 1.0),
        ("4 2", "42", 0.0),
        ("", "42", 0.0),
        ("Blue", "blue", 0.0),
    ],
)
def test_the_answer_counts_wherever_it_stands(text: str, answer: Any, reward: float) -> None:
    assert contains(answered(text, answer)) == reward


@pytest.mark.parametrize("answer", [None, "", " "])
def test_a_prompt_without_an_answer_is_refused(answer: Any) -> None:
    with pytest.raises(
        ValueError, match="has no answer to compare with. Name the field that holds it by --data.answer_field"
    ):
        contains(answered("None", answer))
