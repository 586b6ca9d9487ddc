"""As texts, and through the reward."""

from __future__ import annotations

import pytest
from linear_time import require_linear
from reward_samples import answered

from lightrl.rewards.letter_case import with_own_letters
from lightrl.rewards.math_answer import MathAnswer


@pytest.mark.parametrize(
    ("one", "other", "written"),
    [
        (r"\pi(R^2-r^2)", "0", (r"\pi(q^2-r^2)", "0")),
        ("A", "a", ("q", "a")),
        ("2Mm", "2Qm", ("2wm", "2Qm")),  # q is taken
        ("R^2", "2R", ("R^2", "2R")),
        (r"\Delta x", "d", (r"\Delta x", "d")),
        (r"\mathbb{R}", "r", (r"\mathbb{R}", "r")),
        ("Yes", "yes", ("Yes", "yes")),
        (r"\text{Yes}", "yes", (r"\text{Yes}", "yes")),
    ],
)
def test_a_capital_beside_its_small_letter_is_another_variable(one: str, other: str, written: tuple[str, str]) -> None:
    assert with_own_letters(one, other) == written


RIGHT = [
    (r"\boxed{\pi(R^2-r^2)}", r"\pi(R^2-r^2)"),
    (r"\boxed{\pi(R-r)(R+r)}", r"\pi(R^2-r^2)"),
    (r"\boxed{A}", "A"),
    (r"\boxed{X+1}", "1+X"),
    ("<answer>Yes</answer>", "yes"),
]
WRONG = [
    (r"\boxed{0}", r"\pi(R^2-r^2)"),
    (r"\boxed{\pi(r^2-R^2)}", r"\pi(R^2-r^2)"),
    (r"\boxed{2Rr}", "2r^2"),
    (r"\boxed{M-m}", "0"),
    (r"\boxed{a}", "A"),
    ("<answer>(a)</answer>", "(A)"),
    ("$K$", "k"),
]


def test_variables_of_two_cases_are_two_variables() -> None:
    pytest.importorskip("math_verify")
    reward = MathAnswer()
    assert [pair for pair in RIGHT if reward(answered(*pair)) != 1.0] == []
    assert [pair for pair in WRONG if reward(answered(*pair)) != 0.0] == []


def test_long_texts_take_no_time() -> None:
    for piece in ("Aa", "\\a", r"\text{", r"\text{ab}", " "):
        require_linear(lambda text: with_own_letters(text, "Aa"), lambda n, p=piece: p * n, 20_000)
