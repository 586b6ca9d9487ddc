from __future__ import annotations

import pytest

from lightrl.rewards.clock_time import is_at, time_of


@pytest.mark.parametrize(
    ("answer", "time"),
    [
        ("11:00", (11, 0, "")),
        (r"11:00\text{ a.m.}", (11, 0, "a")),
        (r"$3:30$ PM", (3, 30, "p")),
        (r"3{:}30", None),
        ("3:10", None),  # which may be a ratio
        ("3:2:1", None),
        ("11", None),
        ("1:75", None),
        ("at 11:00", None),
    ],
)
def test_an_answer_is_a_time_only_if_it_can_be_nothing_else(answer: str, time: tuple[int, int, str] | None) -> None:
    assert time_of(answer) == time


@pytest.mark.parametrize(
    "text",
    [
        "11:00",
        "It is at 10:00, no, 11:00 a.m.",
        r"\boxed{11:00\text{ a.m.}}",
        r"11:30 \boxed{11:00}",
        "<answer>11:00 AM</answer>",
    ],
)
def test_a_response_gives_its_time_in_a_box_or_last(text: str) -> None:
    assert is_at((11, 0, "a"), text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "11",
        "11:00 p.m.",
        "11:30",
        "11:00 or 12:00",
        r"\boxed{11}, at 11:00",
        r"\boxed{10:00, 11:00}",
        "<think>11:00</think>12:00",
    ],
)
def test_another_time_or_several_are_wrong(text: str) -> None:
    assert not is_at((11, 0, "a"), text)
