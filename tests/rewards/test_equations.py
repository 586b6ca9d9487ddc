"""As texts, and through the reward."""

from __future__ import annotations

import pytest
from linear_time import require_linear
from reward_samples import answered

from lightrl.rewards.equations import is_name, names_its_value, turned
from lightrl.rewards.math_answer import MathAnswer

NAMES = [
    *("x", "x_1", "a_{10}", "x'", "x^*", r"\theta", r"\lambda_1", r"\hat{y}", r"\Delta x", "f(5)", "f^{-1}(x)", "P(A)"),
    *(
        "AB",
        "|AB|",
        r"\overline{AB}",
        r"m\angle ABC",
        r"S_{\triangle ABC}",
        r"\text{Total cost} ",
        "Area",
        "(x, y)",
        "A:B",
    ),
]
NO_NAMES = [
    *("", " ", "5", "2x", "-x", "xy", "x y", "x+1", "x^2", "x^{-1}", "|x|", "x/2", "2f(x)", "f(x)+1", "f(x)^2", "abc"),
    *(r"\sqrt{x}", r"\frac{1}{x}", r"\sin x", r"\log(x)", r"\sum_{k=1}^n a_k", r"\int_0^1 x", "x" * 101),
]


def test_a_name_is_a_letter_points_a_value_or_words() -> None:
    assert [name for name in NAMES if not is_name(name)] == []
    assert [name for name in NO_NAMES if is_name(name)] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x=5", True),
        ("x=y=5", True),
        ("x=1, y=f(1,2)=2", True),
        (r"\{x=1, y=2\}", True),
        ("2x=5", False),
        ("x=1, 2y=2", False),
        ("4+1=5", True),  # the sides are equal
        ("x=4+1=5", True),
        ("2+2=5", False),
        (r"\sum_{k=1}^{2} k = 3", False),  # one sign of equality is in braces
        ("x <= 5", True),  # no equation
    ],
)
def test_each_equation_of_an_answer_counts(text: str, names: bool) -> None:
    assert names_its_value(text, lambda one, other: (one.strip(), other.strip()) == ("4+1", "5")) is names


def test_a_name_on_the_right_side_is_turned_to_the_left() -> None:
    assert [turned(text) for text in ("5=x", "x=5", "5=2x", "5", "5=4=x")] == ["x=5", "x=5", "5=2x", "5", "5=4=x"]


RIGHT = [
    (r"\boxed{x=5}", "5"),
    (r"\boxed{5=x}", "5"),
    (r"\boxed{x=y=5}", "5"),
    (r"\boxed{f(5)=5}", "5"),
    (r"\boxed{AB=5}", "5"),
    (r"\boxed{2+3=5}", "5"),
    (r"\boxed{\int_0^1 x\,dx=\frac12}", "1/2"),
    (r"\boxed{\sin 30^\circ=\frac12}", "1/2"),
    (r"\boxed{(x,y)=(1,2)}", "(1,2)"),
    (r"\boxed{x=1\text{ or }x=2}", "1,2"),
    (r"\boxed{a+b=5}", "a+b=5"),
    (r"\boxed{x=\pm 6}", r"x=\pm 6"),
    (r"\boxed{2x^2+2=0}", "x^2+1=0"),
    ("3 apples + 2 apples = 5", "5"),
    ("f(2) = 5", "5"),
]
WRONG = [
    (r"\boxed{2x=5}", "5"),
    (r"\boxed{2x+1=5}", "5"),
    (r"\boxed{x^2=5}", "5"),
    (r"\boxed{xy=5}", "5"),
    (r"\boxed{4=5}", "5"),
    (r"\boxed{x=5=6}", "6"),
    (r"\boxed{x=1, 2x=2}", "1,2"),
    (r"$\frac{x}{2}=5$", "5"),
    ("<answer>2x=5</answer>", "5"),
    ("So 2x = 5.", "5"),
    ("x = 4, so x + 1 = 5", "4"),
    ("2a + b = 5", "5"),
    # Neither has a solution among the real numbers.
    (r"\boxed{x^2+2=0}", "x^2+1=0"),
    (r"\boxed{y^2+1=0}", "x^2+1=0"),
]


def test_only_a_name_equals_the_right_side_of_its_equation() -> None:
    pytest.importorskip("math_verify")
    reward = MathAnswer()
    assert [pair for pair in RIGHT if reward(answered(*pair)) != 1.0] == []
    assert [pair for pair in WRONG if reward(answered(*pair)) != 0.0] == []


def test_long_texts_take_no_time() -> None:
    for piece in ("x=", "a,", "(", r"\text{a}", "x_", "=", "a b ", "x'", " ", "{", r"\hat "):
        require_linear(lambda text: names_its_value(text, lambda *_: False), lambda n, p=piece: p * n + "!", 20_000)
        require_linear(is_name, lambda n, p=piece: p * n + "!", 20_000)
