"""Against math-verify itself, in the worker process that a run uses."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from reward_samples import answered

from lightrl.rewards import RewardError, load_reward
from lightrl.rewards.math_answer import MathAnswer
from lightrl.rewards.reward_set import make_runner
from lightrl.rewards.scoring import FailureBudget, RewardRunner

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def runner() -> Iterator[RewardRunner]:
    runner = make_runner(load_reward("math"), name="math")
    yield runner
    runner.close()


RIGHT = [
    ("The answer is 0.5", r"\frac{1}{2}"),
    (r"so it is \boxed{\frac12}", "1/2"),
    ("$\\frac{2}{4}$", 0.5),
    ("1,000", "1000"),
    (r"\boxed{1+x}", "x+1"),
    (r"$\int_0^1 x dx$", "1/2"),
    (r"\boxed{\{2,1\}}", r"\{1,2\}"),
    ("18", "2*9 = 18\n#### 18"),
    ("it costs 42.", 42),
    # The hour, whose sign is short.
    (r"\boxed{5}", "5h"),
    (r"\boxed{5h}", "5"),
    (r"\boxed{5h}", "5 hours"),
    ("It takes 5 hours.", "5h"),
    (r"\boxed{5 meters}", "5m"),
    # Intervals, in both directions.
    (r"\boxed{1 \le x \le 2}", "[1,2]"),
    (r"\boxed{[1,2]}", r"1 \le x \le 2"),
    (r"\boxed{1 < x \leq 2}", "(1,2]"),
    (r"\boxed{x \le 2}", r"(-\infty,2]"),
    (r"\boxed{x \in [1,2]}", r"1 \le x \le 2"),
    # Beside tags and Markdown's marks.
    ("<think>3 x 14</think><answer>42</answer>", "42"),
    ("<answer>-1/2</answer>", "-0.5"),
    (r"\boxed{42.}", "42"),
    (r"\boxed{1{,}000}", "1000"),
    (r"<answer>2\sqrt{3}</answer>", r"2\sqrt{3}"),
    ("<answer> x+1 </answer>", "1+x"),
    ("<answer>B.</answer>", "B"),
    ("<answer>Yes</answer>", "yes"),
    ("<answer>5 or 6</answer>", "5, 6"),
    ("<answer>The answer is **42**.</answer>", "42"),
    ("<answer>42 apples</answer>", "42"),
    ("<answer>$42</answer>", "42"),
    ("<answer>$42$</answer>.", "42"),
    ("<think><answer>41</answer>?</think>42", "42"),
    ("<answer>41</answer><answer>42</answer>", "42"),
    ("<answer>42", "42"),
    (r"\boxed{42}. <answer>See above.</answer>", "42"),
    ("It is **1/2**.", "1/2"),
    ("It is **42** because 40+2=42.", "42"),
    ("Answer: `42`", "42"),
    ("* a list\n* **42**", "42"),
    (r"\boxed{2*-3}", "-6"),
    (r"\boxed{a^*}", "a^*"),
    ("2**3", "8"),
    # Behind the thoughts, if anything is there.
    (r"<think>Perhaps \boxed{5}.</think> It is 6.", "6"),
    (r"<think>It is \boxed{5}.</think>", "5"),
    # With the text of an option.
    (r"\boxed{B. 5}", "B"),
    (r"\boxed{\text{B: five apples}}", "B"),
    (r"\boxed{(B) 5 m}", "(B)"),
    ("<answer>(B) five</answer>", "B"),
    (r"\boxed{A:B = 3:2}", "3/2"),
    # In a notation other than LaTeX.
    (r"\boxed{10\,000}", "10000"),
    (r"\boxed{2\pi}", "2pi"),
    (r"\boxed{\frac{pi}{2}}", r"\frac{\pi}{2}"),
    (r"\boxed{\ln 2}", "ln(2)"),
    (r"\boxed{2\sqrt{3}}", "2\u221a3"),
    (r"\boxed{0.001}", "10^-3"),
    (r"\boxed{x^{10}}", "x**10"),
    (r"$6.02\times 10^{23}$", "6.02e23"),
    ("It is 1e6.", "1000000"),
    ("0.0000001", 1e-7),
    (r"\boxed{e^{-2}}", "e^-2"),
    (r"\boxed{2e}", "2e"),
    # Roots and functions without marks of LaTeX.
    ("<answer>2*sqrt(2)</answer>", r"\sqrt{8}"),
    ("<answer>2 sqrt(2)</answer>", r"\sqrt{8}"),
    ("<answer>exp(3)</answer>", "e^3"),
    ("<answer>arctan(1)</answer>", r"\frac{\pi}{4}"),
    (r"It is 2\sqrt{2}.", r"\sqrt{8}"),
    (r"It is -\frac{\pi}{4}", r"-\pi/4"),
    (r"\boxed{\emptyset}", r"\varnothing"),
    # Other expressions at the end of a plain text.
    ("It is 5x^2.", "5x^2"),
    ("The answer is (7, 5).", "(7,5)"),
    ("The answer is 5 or 7.", "5, 7"),
    ("x = 5", "5"),
    ("The answer is 5 because x > 4.", "5"),
    # Words for a sign or a power of ten.
    ("It is negative 5.", "-5"),
    ("<answer>minus 5</answer>", "-5"),
    ("about 2.5 million people", "2500000"),
    ("5000000", "5 million"),
    (r"\boxed{5\text{ million}}", "5000000"),
    (r"\boxed{5000}", r"5\text{ thousand}"),
    # Relations without a left side.
    (r"\boxed{\ge 5}", r"x \ge 5"),
    ("\\boxed{x \u2264 5}", r"\leq 5"),
    (r"\boxed{\approx 3.14}", "3.14"),
    # Times of day.
    (r"\boxed{11:00}", "11:00"),
    ("It leaves at 11:00 a.m.", r"11:00\text{ a.m.}"),
    (r"\boxed{6:8}", "3:4"),
    # Repeating decimals.
    (r"\boxed{\frac23}", r"0.\overline{6}"),
    (r"\boxed{1.2\overline{3}}", r"\frac{37}{30}"),
    (r"$-0.\bar{3}$", "-1/3"),
    # With signs of Unicode.
    ("The answer is \u22125.", "-5"),
    ("The answer is \u20135.", "-5"),
    ("5\u00b2", "25"),
    ("\\boxed{5\u00d710\u00b3}", "5000"),
    ("5 \u00d7 10\u2074", "50000"),
    ("\\boxed{10\u207b\u00b3}", "0.001"),
    ("\\boxed{60\u00b0}", "60"),
    ("\\boxed{\u221e}", r"\infty"),
    # Very small and very large.
    (r"\boxed{1.6\times 10^{-19}}", r"1.6\times 10^{-19}"),
    (r"\boxed{3.333333333\times 10^{-7}}", r"\frac{1}{3000000}"),
    (r"\boxed{\frac{2}{\sqrt2\cdot10^9}}", r"\frac{\sqrt2}{10^9}"),
    ("0.0012340", "0.001234"),
    ("0.003333", r"\frac{1}{300}"),
    # An exclamation mark in plain text, and a factorial elsewhere.
    ("The answer is 5!", "5"),
    ("The answer is 5!.", "120"),
    (r"\boxed{5!}", "120"),
    ("It is 5!", "5!"),
    ("It is 120!", "5!"),
    (r"\boxed{0.0}", "0"),
    (r"\boxed{\sqrt{8}-2\sqrt{2}}", "0"),
    (r"\boxed{\sin(\pi)}", "0"),
    (r"\boxed{0}", r"\cos(\pi/2)"),
    (r"\boxed{\infty}", r"\infty"),
]
WRONG = [
    ("so 43", "42"),
    ("I don't know", "3"),
    ("", "3"),
    ("It is " + "3" * 5000, "3"),  # more digits than Python reads
    (r"\boxed{x+2}", "x+1"),
    (r"\boxed{\frac{1}{0}}", "1"),
    ("0.51", r"\frac{1}{2}"),
    (r"<think>Perhaps \boxed{5}.</think> It is 6.", "5"),
    (r"\boxed{2}", "2\u221a3"),
    (r"<answer>2\sqrt{3}</answer>", "2"),
    ("<answer>5 or 6</answer>", "6"),
    ("<answer>A</answer>", "B"),
    (r"\boxed{A. B}", "B"),
    ("<answer>41</answer>, not 42", "42"),
    ("<answer></answer>", "42"),
    (r"\boxed{10}", "10^-3"),
    ("<answer>2*sqrt(2)</answer>", "2"),
    ("<answer>5 - sqrt(2)</answer>", "5"),
    (r"It is 2\sqrt{2}.", "2"),
    (r"It is 5\pi.", "5"),
    ("It is 5x^2.", "5"),
    ("5x^2 is the answer.", "5"),
    ("The answer is 5 + 2i.", "5"),
    ("The answer is (7, 5).", "5"),
    ("The answer is 5, 7.", "5"),
    (r"The answer is 5 \times 10^3.", "5"),
    ("The answer is x > 5.", "5"),
    ("The answer is \u2265 5.", "5"),
    ("It is negative 5.", "5"),
    ("<answer>minus 5</answer>", "5"),
    ("5 million", "5"),
    ("5", "5 million"),
    (r"\boxed{5\text{ million}}", "5"),
    (r"\boxed{\geq 5}", "5"),
    (r"\boxed{> 5}", "5"),
    (r"$\neq 5$", "5"),
    (r"\boxed{x \not= 5}", "5"),
    (r"\boxed{\not 5}", "5"),
    (r"\boxed{x \ne 5}", r"x \ne 6"),
    ("\\boxed{\u2265 5}", "5"),
    ("<answer>not 5</answer>", "5"),
    (r"\boxed{5\text{ or more}}", "5"),
    ("The answer is not 5.", "5"),
    (r"\boxed{11:30}", "11:00"),
    (r"\boxed{11}", "11:00"),
    (r"\boxed{0}", r"0.\overline{6}"),
    (r"\boxed{0.6}", r"0.\overline{6}"),
    ("5\u00b2", "5"),
    ("The answer is \u22125.", "5"),
    ("It is 1e6.", "1"),
    (r"\boxed{9\times 10^{-31}}", r"1.6\times 10^{-19}"),
    ("0.0000134", "0.0000125"),
    (r"\boxed{1.2349\times 10^{-4}}", "0.00012345"),
    (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}"),
    (r"\boxed{10^{20}}", "10^{20}+1"),
    (r"\boxed{\frac{1}{0}}", "0"),
    (r"\boxed{10^{-40}}", "0"),
]
FORMS_RIGHT = [
    # Measures: a unit on one side only, or the same on both.
    ("It costs 18 dollars.", "18"),
    ("It costs $18.", "18"),
    (r"\boxed{18}", "18 dollars"),
    (r"\boxed{18}", r"\$18"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{18 dollars}", "18"),
    (r"\boxed{18\text{ cm}^2}", "18"),
    (r"\boxed{18 cm^2}", "18"),
    (r"\boxed{18cm}", "18"),
    (r"\boxed{18}", "18 cm^2"),
    (r"\boxed{18 \text{cm}^2}", "18 cm^2"),
    ("The area is 18 cm^2.", "18"),
    ("The area is 18 square cm.", "18 cm^2"),
    (r"\boxed{\frac{1}{2} miles}", r"\frac12"),
    ("18 ft", "18 feet"),
    ("18 hours", "18 hr"),
    ("In 3 hours she earns 18", "18 dollars"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{18 s}", "18"),
    (r"\boxed{5}", "5th"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{5}", r"5\text{ m}"),
    (r"\boxed{5\text{ square meters}}", r"5\text{ m}^2"),
    (r"\boxed{0.5\text{ hours}}", r"\frac{1}{2}\text{ hr}"),
    ("The answer is 60 miles per hour.", "60 mph"),
    (r"\boxed{5\text{ m/s}}", r"5\text{ meters per second}"),
    # Bases.
    (r"\boxed{101_2}", "101_{2}"),
    (r"\boxed{101}", "101_2"),
    (r"\boxed{101_2}", "101"),
    (r"\boxed{(101)_2}", "101_2"),
    (r"\boxed{\text{101}_{2}}", "(101)_{2}"),
    (r"\boxed{b_2+a_1}", "a_1+b_2"),
    # Mixed numbers.
    (r"\boxed{3\frac{1}{2}}", "3.5"),
    (r"\boxed{3 1/2}", "3.5"),
    (r"\boxed{-3 1/2}", "-3.5"),
    ("It is 3 1/2.", "7/2"),
    (r"\boxed{3.5}", "3 1/2"),
    ("3\u00bd cups", "3.5"),
    ("\\boxed{\u00bd}", "1/2"),
    # Choices.
    (r"\boxed{\textbf{(C)}}", "C"),
    (r"\boxed{\textbf{(C)}\ 18}", "C"),
    (r"\boxed{C}", r"\textbf{(C)}"),
    (r"\boxed{(C)}", "C"),
    (r"\boxed{\text{C}}", "(C)"),
    ("The answer is A.", "A"),
    ("The answer is **(A)**.", "A"),
    ("Answer: C", "C"),
    ("The correct option is C", "C"),
    ("C.", "C"),
    ("(C)", "C"),
    ("<think>The answer is A.</think>The answer is B.", "B"),
    # Equations, thousands, percent.
    (r"\boxed{x=5}", "5"),
    (r"\boxed{5}", "x=5"),
    ("x = 5", "5"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{1234}", "1,234"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50}", r"50\%"),
    (r"\boxed{0.5}", r"50\%"),
    (r"\boxed{6\frac23\%}", r"6\frac{2}{3}\%"),
    (r"\boxed{\frac{20}{3}}", r"6\frac{2}{3}\%"),
    (r"\boxed{1/15}", r"6\frac{2}{3}\%"),
    (r"\boxed{33 1/3\%}", r"\frac13"),
    (r"\boxed{5.5}", r"5.5\%"),
    (r"\boxed{5.5\%}", "5.5"),
    # Intervals, sets, matrices.
    (r"\boxed{(2,\infty)\cup(-\infty,1)}", r"(-\infty,1) \cup (2,\infty)"),
    (r"\boxed{x\in[1,2]}", "[1,2]"),
    (r"\boxed{\left[1,2\right)}", "[1,2)"),
    (r"\boxed{2,1}", r"\{1,2\}"),
    (r"\boxed{x=1\text{ or }x=2}", "1,2"),
    (r"\boxed{\pm 2}", "2,-2"),
    (r"\boxed{\begin{bmatrix}0.5&2\\3&4\end{bmatrix}}", r"\begin{pmatrix}\frac12 & 2\\ 3 & 4\end{pmatrix}"),
    # A variable at the end, which is no unit.
    (r"\boxed{2t}", "2t"),
    ("It is 2t.", "2t"),
    (r"\boxed{3+c}", "3 + c"),
    (r"\boxed{2ba}", "2ab"),
    (r"\boxed{\frac{3t}{2}}", r"\frac32t"),
    (r"\boxed{2 t}", "2t"),
    (r"\fbox{42}", "42"),
]
FORMS_WRONG = [
    ("It costs 18 dollars.", "19"),
    (r"\boxed{17}", "18 dollars"),
    (r"\boxed{18\text{ cm}^2}", "324"),
    (r"\boxed{2}", "18 cm^2"),
    (r"\boxed{18 cm^2}", "2"),
    (r"\boxed{18 cm^3}", "18 cm^2"),
    ("The volume is 18 cm^3.", "18 cm^2"),
    (r"\boxed{18 cm}", "18 km"),
    (r"\boxed{5km}", "5h"),
    (r"\boxed{5 minutes}", "5h"),
    (r"\boxed{5h}", "5 minutes"),
    (r"\boxed{2 km}", "2t"),
    (r"\boxed{5t}", "5 km"),
    (r"\boxed{5t}", "5h"),
    (r"\boxed{5\text{ cm}}", r"5\text{ m}"),
    (r"\boxed{5\text{ cm}}", "5 m"),
    (r"\boxed{5\text{ cm}^2}", r"5\text{ cm}"),
    (r"\boxed{\frac{1}{2}\text{ hours}}", r"\frac12\text{ minutes}"),
    (r"\boxed{2\pi\text{ cm}}", r"2\pi\text{ m}"),
    (r"\boxed{90^\circ}", r"90\text{ radians}"),
    ("It is $5\\text{ cm}$.", r"5\text{ m}"),
    # Another base.
    (r"\boxed{101_2}", "101_3"),
    (r"\boxed{101_2}", "5"),
    (r"\boxed{(101)_2}", "(101)_3"),
    (r"\boxed{(101)_2}", "(110)_2"),
    (r"\boxed{(101)_2}", "5"),
    (r"\boxed{5}", "101_2"),
    # Another interval.
    (r"\boxed{1 \le x \le 3}", "[1,2]"),
    (r"\boxed{1 \le x \le 2}", "[1,2)"),
    (r"\boxed{(1,2)}", r"1 \le x \le 2"),
    ("18 minutes", "18 hours"),
    (r"\boxed{18 million}", "18"),
    (r"\boxed{3 xy}", "3"),
    (r"\boxed{3\frac{1}{2}}", "1.5"),
    (r"\boxed{3 1/2}", "31/2"),
    (r"\boxed{3 1/2}", "3/2"),
    (r"\boxed{3 1/2}", "3"),
    (r"\boxed{-3 1/2}", "-2.5"),
    (r"\boxed{3 5/2}", "5.5"),
    ("It is 3 1/2.", "1/2"),
    ("1/2", "3 1/2"),
    (r"\boxed{\textbf{(B)}}", "C"),
    (r"\boxed{\textbf{(C)}\ 18}", "B"),
    (r"\boxed{C, D}", "C"),
    (r"\boxed{18}", "C"),
    ("The answer is A.", "B"),
    ("The answer is A or B.", "A"),
    ("The answer is A triangle.", "A"),
    ("The answer is not A.", "A"),
    ("The answer is C. No, D.", "C"),
    ("(A) is wrong. The answer is 7.", "A"),
    ("(A) 5 (B) 6", "A"),
    ("If the answer is C, then 1 = 2.", "C"),
    ("C", "D"),
    (r"\boxed{x=5}", "6"),
    (r"\boxed{5}", "x=6"),
    (r"\boxed{x=5}", "y=5"),
    (r"\boxed{1,234}", "234"),
    (r"\boxed{50\%}", "5"),
    (r"\boxed{0.05}", r"50\%"),
    (r"\boxed{6}", r"6\frac{2}{3}\%"),
    (r"\boxed{550}", r"5.5\%"),
    (r"\boxed{0.055\%}", r"5.5\%"),
    (r"\boxed{5000}", r"50\%"),
    (r"\boxed{[1,2]}", "[1,2)"),
    (r"\boxed{(1,2)}", "(2,1)"),
    (r"\boxed{(1,2)}", "[1,2]"),
    (r"\boxed{1}", "1,2"),
    (r"\boxed{\{1,2\}}", "(1,2)"),
    (r"\boxed{(1,2)}", r"\{1,2\}"),
    (r"\boxed{5!}", "5"),
    ("The answer is 5!.", "5"),
    ("It is 5!", "120"),
    (r"It is 0.79\%.", r"79\%"),
    (r"\boxed{1,2,3}", "1,2"),
    (r"\boxed{\begin{pmatrix}1&3\\2&4\end{pmatrix}}", r"\begin{pmatrix}1 & 2\\ 3 & 4\end{pmatrix}"),
    (r"\boxed{2t}", "2"),
    (r"\boxed{2}", "2t"),
    (r"\boxed{2s}", "2t"),
    ("It is 2.", "2t"),
    ("It is 2x.", "2t"),
    ("<answer>2</answer>", "2t"),
    ("<answer>2t</answer>", "2"),
    (r"\boxed{5x+2}", "5x+2c"),
    (r"\boxed{3}", "3 + c"),
    (r"\boxed{2}", "2ab"),
    (r"\boxed{\frac32}", r"\frac32t"),
    (r"\boxed{\pi r^2}", r"\pi r^2 h"),
]


@pytest.mark.parametrize(("right", "wrong"), [(RIGHT, WRONG), (FORMS_RIGHT, FORMS_WRONG)], ids=["values", "forms"])
def test_equal_values_are_right_however_they_are_written(
    runner: RewardRunner, right: list[tuple[str, object]], wrong: list[tuple[str, object]]
) -> None:
    rewards = runner.run([answered(text, answer) for text, answer in right + wrong], FailureBudget())
    wanted = [1.0] * len(right) + [0.0] * len(wrong)
    assert [pair for pair, *both in zip(right + wrong, rewards, wanted, strict=True) if both[0] != both[1]] == []


def test_a_process_loads_math_verify_before_its_first_sample() -> None:
    """Otherwise a slow disk could use up the time for it, and leave a library that is loaded in part."""
    code = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1])); print('sympy' in sys.modules)"
    packed = pickle.dumps(MathAnswer()).hex()
    assert subprocess.run([sys.executable, "-c", code, packed], capture_output=True, text=True).stdout == "True\n"


def test_the_prompt_is_not_read(runner: RewardRunner) -> None:
    sample = answered("no idea", "42", prompt_text=r"Example: \boxed{42}. What is 6 x 7?")
    assert runner.run([sample], FailureBudget()) == [0.0]


def test_an_expression_without_end_has_no_verdict_and_stops_nothing(runner: RewardRunner) -> None:
    started = time.monotonic()
    budget = FailureBudget()
    samples = [answered(r"\boxed{9^{9^{9^{9}}}}", "2"), answered("2", "2", position=1)]
    hanging, right = runner.run(samples, budget)
    assert isinstance(hanging, RewardError)
    assert hanging.is_no_verdict
    assert right == 1.0
    assert len(budget.no_verdicts) == 1
    assert time.monotonic() - started < 60


def test_an_answer_that_is_no_mathematics_is_an_error(runner: RewardRunner) -> None:
    with pytest.raises(RewardError, match="'math' raised .* the prompt has no answer"):
        runner.run([answered("1", None)], FailureBudget())
    with pytest.raises(RewardError, match="finds no mathematical expression in the prompt's answer ''"):
        runner.run([answered("1", "$ $ ####")], FailureBudget())
