from __future__ import annotations

from typing import Any

import pytest

from lightrl.rewards.applicability import (
    Condition,
    conditions_of,
    require_judges,
    require_readable,
    require_values,
)

LABELS = ("math", "code", "format")
CONDITIONS = conditions_of(
    ("math.data_source=openai/gsm8k", "math.data_source=a=b", "code.extra.style=apps", "code.level=3"), LABELS
)


def located(*records: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    return [(record, f"data.jsonl:{line}") for line, record in enumerate(records, start=1)]


def test_any_value_of_a_field_and_all_fields() -> None:
    assert list(CONDITIONS) == ["math", "code"]
    assert str(CONDITIONS["math"]) == "data_source is openai/gsm8k or a=b"
    assert str(CONDITIONS["code"]) == "extra.style is apps and level is 3"
    math, code = CONDITIONS["math"], CONDITIONS["code"]
    assert [math.admits({"data_source": value}) for value in ("openai/gsm8k", "a=b", "a", None)] == [
        True, True, False, False
    ]  # fmt: skip
    assert code.admits({"extra": {"style": "apps"}, "level": 3})
    assert code.admits({"extra.style": "apps", "level": "3"})
    assert not code.admits({"extra": {"style": "apps"}})
    assert not code.admits({"extra": "apps", "level": 3})


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), (False, "false"), (0.5, "0.5"), (7, "7"), ("True", "True")]
)
def test_values_that_are_no_texts(value: Any, text: str) -> None:
    condition = Condition(allowed={"field": [text]})
    assert condition.admits({"field": value})
    assert not condition.admits({"field": f"{value}x"})
    assert not condition.admits({})


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (("math",), "'math': it must be reward.field=value"),
        (("math=gsm8k",), "'math=gsm8k': it must be reward.field=value"),
        (("math.source=",), "it must be reward.field=value"),
        (("maths.source=a",), "--reward has no 'maths'. Did you mean math"),
        (("math.source=a", "math.source=a"), "--reward_for math.source=a is given twice"),
    ],
)
def test_what_cannot_be_read_is_refused(items: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conditions_of(items, LABELS)


def test_every_record_needs_a_reward() -> None:
    records = located({"data_source": "a=b"}, {"extra": {"style": "apps"}, "level": 3}, {"data_source": "c"})
    require_judges(CONDITIONS, ("math", "code"), records[:2])
    require_judges(CONDITIONS, LABELS, records)  # format judges all
    with pytest.raises(
        ValueError,
        match=r"^data.jsonl:3: no reward is for this record. --reward_for gives math if data_source is openai/gsm8k or "
        "a=b; code if extra.style is apps and level is 3",
    ):
        require_judges(CONDITIONS, ("math", "code"), records)


def test_every_value_needs_a_record() -> None:
    records = located({"data_source": "a=b", "level": 3}, {"data_source": "openai/gsm8k", "extra": {"style": "taco"}})
    with pytest.raises(ValueError, match="code.extra.style=apps: no record has this value. There are 'taco'"):
        require_values(CONDITIONS, records)
    require_values(CONDITIONS, [*records, *located({"extra": {"style": "apps"}})])
    many = located(*({"data_source": f"set {index}"} for index in range(12)))
    with pytest.raises(ValueError, match=r"data_source=openai/gsm8k: .* 'set 0', .*'set 9', \.\.\.\.$"):
        require_values(CONDITIONS, many)


def test_the_prompt_and_the_answer_are_no_fields_to_choose_by() -> None:
    require_readable(CONDITIONS, ("prompt", "answer"))
    with pytest.raises(ValueError, match="--reward_for code.level: the field holds the prompt or the answer"):
        require_readable(CONDITIONS, ("prompt", "level"))
