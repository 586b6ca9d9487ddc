"""Numbers with their nouns."""

from lightrl.wording import counted


def test_only_one_is_singular() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
