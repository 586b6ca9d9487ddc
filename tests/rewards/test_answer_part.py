from __future__ import annotations

import re

import pytest
from linear_time import require_linear

from lightrl.rewards.answer_part import answer_part, behind_thoughts, without_commands


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{4} or \fbox {\frac{1}{2}}.", r"\frac{1}{2}"),
        ("<answer>4</answer><answer>5</answer>", "5"),
        (r"\boxed{5} <answer>4</answer>", "5"),
        (r"\boxed{5", ""),
        ("5", None),
        ("<answer>5", None),
    ],
)
def test_the_last_box_or_else_the_last_tags_hold_the_answer(text: str, part: str | None) -> None:
    assert answer_part(text) == part


def test_thoughts_count_only_if_nothing_follows_them() -> None:
    assert behind_thoughts("<think>4</think> 5") == " 5"
    assert behind_thoughts("<think>4</think>\n") == "<think>4</think>\n"
    assert behind_thoughts("5") == "5"


def test_commands_and_the_spaces_of_latex_leave_a_plain_text() -> None:
    assert without_commands(r" 3\,:~\text{4} $5$", re.compile(r"\\text\{([^{}]*)\}")) == "3 : 4 5"


def test_long_texts_take_no_time() -> None:
    for piece in ("\\boxed{", "<answer>", "<answer>5</answer>", "{" * 10):
        require_linear(answer_part, lambda n, p=piece: p * n, 3000)
