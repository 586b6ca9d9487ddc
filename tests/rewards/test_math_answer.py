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
    # Very small and very large.
    (r"\boxed{1.6\times 10^{-19}}", r"1.6\times 10^{-19}"),
    (r"\boxed{3.333333333\times 10^{-7}}", r"\frac{1}{3000000}"),
    (r"\boxed{\frac{2}{\sqrt2\cdot10^9}}", r"\frac{\sqrt2}{10^9}"),
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
    ("It is 1e6.", "1"),
    (r"\boxed{9\times 10^{-31}}", r"1.6\times 10^{-19}"),
    (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}"),
    (r"\boxed{10^{20}}", "10^{20}+1"),
    (r"\boxed{\frac{1}{0}}", "0"),
    (r"\boxed{10^{-40}}", "0"),
]


def test_equal_values_are_right_however_they_are_written(runner: RewardRunner) -> None:
    samples = [answered(text, answer) for text, answer in RIGHT + WRONG]
    assert runner.run(samples, FailureBudget()) == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


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
