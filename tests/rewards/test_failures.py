from __future__ import annotations

import pytest
from reward_samples import answered

from lightrl.rewards import NoVerdictError, RewardError
from lightrl.rewards.scoring import FailureBudget, failed, not_a_number, not_judged, with_traceback, wrong_count


def some_error() -> ValueError:
    try:
        int("x")
    except ValueError as error:
        return error
    raise AssertionError


def test_messages_name_reward_prompt_and_response() -> None:
    sample = answered("hello", position=3, sample_index=2)
    error = failed("mine", [sample], some_error())
    assert str(error) == (
        "The reward 'mine' raised ValueError: invalid literal for int() with base 10: 'x' on prompt 13 '', sample 2, "
        "response 'hello'."
    )
    assert error.key == (3, 2)
    assert 'int("x")' in with_traceback(error)
    unsure = failed("mine", [sample, sample], NoVerdictError("who knows"))
    assert str(unsure).startswith("The reward 'mine' gave no verdict (who knows) on 2 samples, first prompt 13")
    assert unsure.is_no_verdict
    assert not error.is_no_verdict
    assert "returned 'one' (str) on prompt 13" in str(not_a_number("mine", sample, "one"))
    assert str(not_judged({"mine": ""}, sample)).endswith(
        "response 'hello'. None says that a reward does not apply to the sample, and there is no other reward. If it "
        "should apply, does the function lack a return?"
    )
    assert str(not_judged({"mine": "", "other": "is for records whose level is 2"}, sample)) == (
        "No reward applies to prompt 13 '', sample 2, response 'hello': 'mine' returned None, 'other' is for records "
        "whose level is 2. Give a reward that judges such records, or leave them out of the data."
    )
    assert "returned 3 numbers for 1 samples" in with_traceback(wrong_count("mine", [sample], 3))


def test_without_a_budget_the_first_failure_is_raised_itself() -> None:
    budget = FailureBudget()
    error = failed("mine", [answered("a")], some_error())
    budget.record([1.0, failed("mine", [answered("b")], NoVerdictError("?"))])
    assert len(budget.no_verdicts) == 1
    with pytest.raises(RewardError, match="raised ValueError") as info:
        budget.record([error])
    assert info.value is error


def test_a_budget_is_for_all_that_is_recorded() -> None:
    budget = FailureBudget(2)
    error = failed("mine", [answered("a")], some_error())
    budget.record([error])
    budget.record([0.0, error])
    with pytest.raises(
        RewardError, match="3 rewards have failed, more than --max_reward_failures 2. The first: The rew"
    ):
        budget.record([error])
