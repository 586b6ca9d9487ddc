from __future__ import annotations

import pytest
from linear_time import require_linear

from lightrl.rewards.answer_words import is_qualified


@pytest.mark.parametrize(
    "text",
    [
        "<answer>not 5</answer>",
        "<answer>It isn't 5</answer>",
        r"\boxed{\text{at least }5}",
        r"\boxed{5\text{ or more}}",
        "<answer>more than $5$</answer>",
        "<answer>5 is wrong</answer>",
        "<answer>5 squared</answer>",
        "<answer>half of 5</answer>",
        "The answer is not 5.",
        "The answer is 5 squared.",
        "It is the square root of $5",
        "It is half of 5.",
        r"\boxed{\text{the square of }5}",
        "<think>It is 5.</think> It isn't **5**.",
    ],
)
def test_words_beside_a_number_make_another_answer_of_it(text: str) -> None:
    assert is_qualified(text)


@pytest.mark.parametrize(
    "text",
    [
        "<answer>5</answer>",
        "<answer>There is not enough, so 5</answer>",
        "<answer>about 5</answer>",
        "It is not 4, it is 5.",
        "At least 5.",
        "The square root of 25 is 5.",
        "5 squared is 25.",
        "It is 5 squared inches.",
        "It is not 5.\nSo it is 6.",
        r"It is not 4: \boxed{5}",
        r"<think>not 5</think> \boxed{5}",
        "",
    ],
)
def test_other_words_do_not(text: str) -> None:
    assert not is_qualified(text)


def test_long_texts_take_no_time() -> None:
    for piece in ("not ", "at least ", "5 ", "\n"):
        require_linear(is_qualified, lambda n, p=piece: f"<answer>{p * n}</answer>", 3000)
        require_linear(is_qualified, lambda n, p=piece: p * n, 3000)
