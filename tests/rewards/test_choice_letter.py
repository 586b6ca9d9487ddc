from __future__ import annotations

import pytest
from linear_time import require_linear

from lightrl.rewards.choice_letter import choice_of, stated_choice


@pytest.mark.parametrize("answer", ["C", "(C)", "[C]", "C.", "$C$", r"\textbf{(C)}", r"\text{C}", "**C**", r"\(C\)"])
def test_an_answer_that_is_a_letter_is_a_choice(answer: str) -> None:
    assert choice_of(answer) == "C"


@pytest.mark.parametrize("answer", ["18", "Cat", "c", "(C) 5", "CD", "K", "C+1", ""])
def test_other_answers_are_no_choice(answer: str) -> None:
    assert choice_of(answer) == ""


@pytest.mark.parametrize(
    "text",
    [
        "C",
        "C. 18",
        "C) 18",
        r"(C) $\frac{1}{2}$",
        "Answer:\nC",
        "ANSWER: C",
        "**Answer: C**",
        "The answer is (C) 18 dollars.",
        "The answer is C because 5 > 3.",
        "The answer is C. (A is a trap.)",
        "The answer is B.\n\nThe answer is C.",
        "The answer is choice (C).",
        "The best choice: C",
        r"The answer is $\textbf{(C)}\ 18$.",
        r"\boxed{\textbf{(C) }18}",
        "<answer>(C) 18</answer>",
        "<think>The answer is C.</think>",
    ],
)
def test_a_stated_letter_is_found(text: str) -> None:
    assert stated_choice(text) == "C"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "C) 18\nD) 19",
        "(C) is wrong",
        "(C) 5 (D) 6",
        "Choice C: 5\nChoice D: 6",
        "Option C is wrong, so the answer is 7",
        "I considered answer C, which failed.",
        "The answer is C-reactive",
        "The answer is C's",
        "The answer is C?",
        "The answer is C, D",
        "The answer is C/D",
        "The answer is C is wrong",
        "The answer is c.",
        "It isn't true that the answer is C.",
        "The answer is C. D is wrong.",
        r"\boxed{C, D}",
        r"\boxed{CD}",
        r"\boxed{",
        "<answer>7</answer> The answer is C.",
    ],
)
def test_what_settles_on_no_letter_states_none(text: str) -> None:
    assert stated_choice(text) == ""


def test_an_article_is_no_letter() -> None:
    assert stated_choice("The answer is A triangle.") == ""
    assert stated_choice("The answer is B. A triangle has three sides, I think.") == "B"


def test_long_texts_take_no_time() -> None:
    for part, count in (
        ("The answer is C. ", 5000),
        ("answer", 20_000),
        (" ", 100_000),
        ("\\boxed{", 5000),
        ("(C) ", 20_000),
    ):
        require_linear(stated_choice, lambda n, p=part: p * n, count)
