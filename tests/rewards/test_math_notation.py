"""As texts; test_math_answer.py compares what math-verify makes of them."""

from __future__ import annotations

import pytest
from linear_time import require_linear

from lightrl.rewards.math_notation import ends_with_factorial, in_latex, with_marks

REWRITTEN = {
    r"\fbox{5}": r"\boxed{5}",
    r"10\,000": "10000",
    "2pi/3": r"2\pi/3",
    "2\u221a3": r"2\sqrt{3}",
    "2sqrt(3) + exp(2)": r"2\sqrt{3} + \exp(2)",
    "arctan(1)": r"\arctan(1)",
    "10^-3": "10^{-3}",
    r"\boxed{73.}": r"\boxed{73}",
    "1.6e-3": "0.0016",
    "3 1/2": "7/2",
    "3\u00bd": "7/2",
    "\u2153": "1/3",
    # Repeating decimals: 16 - 1, and 6 of 9.
    r"0.1\overline{6}": r"\frac{15}{90}",
    r"-.\bar{6}": r"-\frac{6}{9}",
    # Fractions of a percent.
    r"6\frac{2}{3}\%": r"6.666666666667\%",
    r"\dfrac12\%": r"0.500000000000\%",
    r"33 1/3\%": r"33.333333333333\%",
    # Bases.
    "(101)_2": "101_{2}",
    r"\text{101}_{2}": "101_{2}",
    "(19)_{16}": "19_{16}",
    r"\varnothing": r"\emptyset",
    # Words.
    "Minus 5": "-5",
    "It is negative 5.": "It is -5.",
    "5 million": "5000000",
    "2.5 billion": "2500000000",
    r"5 \text{ thousand}": "5000",
    r"5.2\text{ million dollars}": r"5200000\text{ dollars}",
    "5 dozen": "60",
    r"5\text{ dozen eggs}": r"60\text{ eggs}",
    "5 sixths": "5/6",
    r"5\text{ hundredths}": "5/100",
    "5 and a half": "5.5",
    r"5\text{ and a half}": "5.5",
    # Relations.
    r"\boxed{ \geq 5}": r"\boxed{x\geq 5}",
    r"$< 5$": r"$x< 5$",
    r"x \not= 5": r"x \ne  5",
    # Signs of Unicode.
    "\u22125": "-5",
    "It is \u20135.": "It is -5.",
    "5\u00b2": "5^2",
    "5\u00d710\u207b\u00b3": "5*10^{-3}",
    "6\u00b73": "6*3",
    "60\u00b0": r"60^\circ ",
    "log\u2082 8": r"\log_2 8",
    "1\u202f234": "1234",
}


@pytest.mark.parametrize("text", REWRITTEN)
def test_a_notation_is_written_in_latex(text: str) -> None:
    assert in_latex(text) == REWRITTEN[text]


@pytest.mark.parametrize(
    "text",
    [
        "3 5/2",
        "(5)_{3}",
        "f(1)_2",
        "5thousand",
        r"\boxed{x \geq 5}",
        r"\boxed{\left(1,2\right)}",
        "31/2",
        r"\pi",
        r"\text{log}",
        r"\frac{1}{2}",
        r"\frac{1}{0}\%",
        "e6",
        "a minus b",
        r"\left(1,2\right).",
        "3\u20135",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert in_latex(text) == text


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        (r"It is 2\sqrt{3}.", r"It is $2\sqrt{3}$."),
        (r"x=5\pi", r"$x=5\pi$"),
        (r"Of $5\pi$ and 2\sqrt{3}", r"Of $5\pi$ and 2\sqrt{3}"),
        (r"2\sqrt{3} is right", r"{2\sqrt{3} is right"),
        ("It is 5.", "It is 5."),
        ("It is 5x^2.", "It is $5x^2$."),
        ("5 + 2i", "$5 + 2i$"),
        ("The answer is (7, 5).", "The answer is $(7, 5)$."),
        ("Answer: 5 or 7", "Answer: $5 or 7$"),
        (r"It is 5 \times 10^3.", r"It is $5 \times 10^3$."),
        ("It is > 5.", "It is $x> 5$."),
        ("5x^2 is right, and 5i", "{5x^2 is right, and {5i"),
        ("It is x = 5", "It is x = 5"),
        ("It is 2 + 3.", "It is 2 + 3."),
        ("It is 1,234!", "It is 1,234!"),
        (r"It is 0.79\%.", "It is 0.79%."),
        ("It is 5!", "It is 5!"),
        ("It is 5!.", "It is 120."),
        ("5! is it", "120 is it"),
        ("It is 5! Great", "It is 5! Great"),
        ("It is 5 m, 5h", "It is 5 m, 5h"),
        ("It is a 5", "It is a 5"),
        ("It is 5 because x > 4.", "It is 5 because x > 4."),
        ("It is 5 apples", "It is 5 apples"),
        ("It is (A)", "It is (A)"),
    ],
)
def test_an_expression_at_the_end_of_a_plain_text_is_marked(text: str, marked: str) -> None:
    assert with_marks(text) == marked


@pytest.mark.parametrize(
    ("text", "answer", "ends"),
    [
        ("It is 5!", "5!", True),
        ("It is n!.", "n!", True),
        ("It is 5!", "5", False),
        ("It is 15!", "5!", False),
        ("It is 2 * -5!", "5!", False),
        (r"$2\cdot 5!$", "5!", False),
        ("<answer>3 + 5!", "5!", False),
    ],
)
def test_a_plain_text_may_end_with_a_factorial(text: str, answer: str, ends: bool) -> None:
    assert ends_with_factorial(text, answer) is ends


def test_long_texts_take_no_time() -> None:
    for piece in ("= ", "x + ", "5x^2 ", "is ", r"\x ", "\n", "5!", "5! "):
        require_linear(with_marks, lambda n, p=piece: p * n, 3000)
