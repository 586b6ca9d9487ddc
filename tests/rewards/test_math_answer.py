"""Against math-verify itself, in the worker process that a run uses."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from reward_samples import answered

from lightrl.rewards import RewardError, load_reward
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
]
WRONG = [
    ("so 43", "42"),
    ("I don't know", "3"),
    ("", "3"),
    (r"\boxed{x+2}", "x+1"),
    (r"\boxed{\frac{1}{0}}", "1"),
    ("0.51", r"\frac{1}{2}"),
]


def test_equal_values_are_right_however_they_are_written(runner: RewardRunner) -> None:
    samples = [answered(text, answer) for text, answer in RIGHT + WRONG]
    assert runner.run(samples, FailureBudget()) == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


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
