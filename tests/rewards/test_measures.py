from __future__ import annotations

import pytest
from linear_time import require_linear

from lightrl.rewards.measures import (
    has_other_base,
    has_other_unit,
    split_letter,
    split_measure,
    unit_of,
    without_unit,
)


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        ("18 cm^2", "18", "cm^2"),
        ("1,234.50 dollars.", "1,234.50", "dollars"),
        ("-1/2 mile", "-1/2", "mile"),
        (r"\frac{1}{2}~feet", r"\frac{1}{2}", "feet"),
        ("18cm", "18", "cm"),
        ("5 square units", "5", "square units"),
        ("5 m", "5", "m"),
        (r"$5\text{ m}^2$", "5", "meter^2"),
        (r"90^\circ", "90", "degrees"),
        (r"3\,\mathrm{kg}", "3", "kg"),
    ],
)
def test_a_measure_is_a_number_and_a_unit(text: str, number: str, unit: str) -> None:
    assert split_measure(text) == (number, unit)


@pytest.mark.parametrize(
    "text",
    ["18", "18 x", "18 million", "3 ab", "x in", "18 cm^4", "18 to 20 cm", "2 min x", "5 m/s", "60 miles per hour", ""],
)
def test_other_texts_are_no_measure(text: str) -> None:
    assert split_measure(text) == (text, "")


def test_only_another_unit_of_the_same_number_is_another_unit() -> None:
    assert has_other_unit("It is 18 cm^3.", "18", "cm^2")
    assert has_other_unit("It is 18 min.", "18", "hours")
    assert has_other_unit("It is 18 cm.", "18", "square cm")
    for text in ("18", "18 square centimetres", "It took 3 hours: 18 cm^2", "18 cm\u00b2 (18 cm wide)"):
        assert not has_other_unit(text, "18", "cm^2")


def test_letters_behind_a_number_may_be_a_unit_too() -> None:
    assert split_letter("2t.") == ("2", "t")
    assert split_letter("2 t") == ("2 t", "")
    assert split_measure("5h") == ("5", "h")
    for letter, same in (("m", "5 meters"), ("g", "5 grams"), ("s", "5 seconds"), ("h", "5 hrs")):
        assert not has_other_unit(same, "5", letter)
        assert has_other_unit("5 km", "5", letter)
    assert not has_other_unit("5 km", "5", "")


def test_a_unit_is_left_out_of_a_box_that_holds_nothing_else() -> None:
    assert without_unit(r"so \boxed{18 cm^2} and 5 cm") == r"so \boxed{18} and 5 cm"
    assert without_unit(r"\boxed{x + 18 cm}") == r"\boxed{x + 18 cm}"


def test_an_expression_has_the_unit_at_its_end() -> None:
    assert unit_of(r"2\pi\text{ cm}") == "cm"
    assert unit_of(r"5\sqrt{2}\ \text{sq. ft}.") == "sq. ft"
    for text in ("2x", r"60\text{ miles per hour}", "they are in", r"5\text{ apples}"):
        assert unit_of(text) == ""


def test_what_a_box_holds_is_the_measure_of_a_text() -> None:
    assert has_other_unit(r"5 m, or \boxed{5\text{ cm}}", "5", "m")
    assert has_other_unit(r"\boxed{0.5\text{ min}}", r"\frac{1}{2}", "hours")
    assert not has_other_unit(r"5 cm, or \boxed{5\text{ m}}", "5", "m")
    assert not has_other_unit(r"\boxed{9\text{ sq. cm}}", "9", "cm^2")


def test_a_number_with_an_index_has_another_base_only_than_one_with_another_index() -> None:
    assert has_other_base(r"\boxed{101_{3}}", "101_2")
    assert has_other_base("It is 101_10.", "$101_{2}$")
    for text, answer in ((r"\boxed{101_{2}}", "101_2"), ("101", "101_2"), ("101_2", "101"), ("2+b_2", "b_2+a_1")):
        assert not has_other_base(text, answer)


@pytest.mark.parametrize("piece", ["1,", "1.", "1 ", "1)", "101_", "_2", "101_{2} "])
def test_a_base_is_looked_for_in_linear_time(piece: str) -> None:
    require_linear(lambda text: has_other_base(text, "101_2"), lambda n: piece * n, 8_000)
