from __future__ import annotations

from typing import Any

import pytest
from linear_time import require_linear
from made_samples import made_sample

from lightrl.records import Prompt, Sample
from lightrl.rewards.text_match import contains, exact_match, expected_answer, last_number


def answered(text: str, answer: Any) -> Sample:
    return made_sample(prompt=Prompt(index=0, text="", token_ids=(1,), answer=answer), text=text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("first 3, then 42.", 42),
        ("42.0", "42"),
        ("it costs $1,234.50", "1234.5"),
        (r"$10\,000$", 10000),
        (r"1{,}234{,}567", 1234567),
        (r"10,\!000.5", 10000.5),
        (r"$7\,12$", 12),
        ("1,234,567", 1234567),
        ("sum: -7", "-7"),
        ("\u22127", -7),
        ("10-7", "7"),
        ("(10)-7", "7"),
        ("x = -7", "-7"),
        (".5", 0.5),
        ("-.5", -0.5),
        ("0.3", 0.3),
        ("2e3", "2000"),
        ("1e-05", 1e-05),
        ("so it is 18 dollars", "2 * 9 = 18\n#### 18"),
        ("1, 2, 3", 3),
        ("1,2", 2),
        ("\\boxed{12}", 12),
        ("on 3rd", 3),
        ("version 1.2.3", 0.3),
    ],
)
def test_the_last_number_is_right(text: str, answer: Any) -> None:
    assert last_number(answered(text, answer)) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", 42),
        ("forty-two", 42),
        ("42 or 43", 42),
        ("142", 42),
        ("42", -42),
        ("4.2", 42),
        ("1,234", 234),
        ("0.30000001", 0.3),
        ("1e999999999999999999999", 42),
    ],
)
def test_the_last_number_is_wrong_or_absent(text: str, answer: Any) -> None:
    assert last_number(answered(text, answer)) == 0.0


def test_an_answer_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="answer 'blue' holds no number"):
        last_number(answered("42", "blue"))


def test_a_long_response_takes_no_time() -> None:
    for part in ("1", "1,234", "-", ".", "1e"):
        require_linear(lambda text: last_number(answered(text, 42)), lambda n, p=part: p * n, 50_000)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("42", "42", 1.0),
        ("it is 42, I think", 42, 1.0),
        ("142", "42", 1.0),
        ("4 2", "42", 0.0),
        ("", "42", 0.0),
        ("Blue", "blue", 0.0),
    ],
)
def test_the_answer_counts_wherever_it_stands(text: str, answer: Any, reward: float) -> None:
    assert contains(answered(text, answer)) == reward


@pytest.mark.parametrize("answer", [None, "", " "])
def test_contains_needs_an_answer(answer: Any) -> None:
    with pytest.raises(ValueError, match="has no answer to compare with .--data.answer_field names the field"):
        contains(answered("None", answer))


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("42", "42", 1.0),
        (" 42\n", 42, 1.0),
        ("42", "42\n", 1.0),
        ("42.", "42", 0.0),
        ("the 42", "42", 0.0),
        ("", "42", 0.0),
        ("Blue", "blue", 0.0),
        ("0", 0, 1.0),
    ],
)
def test_only_the_whole_answer_counts(text: str, answer: Any, reward: float) -> None:
    assert exact_match(answered(text, answer)) == reward


@pytest.mark.parametrize("answer", [None, "", " "])
def test_exact_match_needs_an_answer(answer: Any) -> None:
    with pytest.raises(ValueError, match="has no answer to compare with .--data.answer_field names the field"):
        exact_match(answered("None", answer))


def test_the_answer_becomes_stripped_text() -> None:
    assert [expected_answer(answered("", answer)) for answer in (" a b\n", 0, 2.5, False)] == [
        "a b",
        "0",
        "2.5",
        "False",
    ]


@pytest.mark.parametrize("answer", [None, "", "\n"])
def test_no_answer_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="no answer to compare with"):
        expected_answer(answered("", answer))


@pytest.mark.parametrize("answer", [["42", "43"], {"ground_truth": "42"}, []])
def test_an_answer_that_is_no_text_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="is neither a text nor a number: write a reward of your own"):
        exact_match(answered("42", answer))
