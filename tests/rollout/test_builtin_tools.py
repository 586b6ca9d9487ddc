"""Tools that every run has."""

from __future__ import annotations

import pytest

from lightrl.cores import cores_of_rank
from lightrl.rollout.builtin_tools import calculator, python
from lightrl.rollout.tool_calls import CallError, load_tool


def test_the_calculator() -> None:
    assert calculator("(12 + 3) * -4 // 7 % 5 + 2**3") == str((12 + 3) * -4 // 7 % 5 + 2**3)
    assert calculator(" 1 / 4 ") == "0.25"
    assert calculator(12) == "12"  # type: ignore[arg-type]  # a policy may leave the quotes out


@pytest.mark.parametrize(
    "expression",
    [
        *("__import__('os')", "a", "(1).real", "9**9**9", "'x' * 9", "1 if 1 else 2", "2**", "<tool>1", "", "1\0"),
        *("1 / 0", "9.0**400", "(-8)**0.5 % 2", "*".join(["9**3000"] * 3), "(" * 9_000, "-" * 9_000 + "1"),
    ],
)
def test_the_calculator_blames_the_call_for_what_cannot_be_calculated(expression: str) -> None:
    with pytest.raises(CallError, match=r"^[A-Z]\w+Error: "):
        calculator(expression)


def test_a_program_runs_in_the_sandbox() -> None:
    assert python("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in python("print(1)\n1 / 0")


def test_they_are_described_by_their_docstrings() -> None:
    for name, argument in (("calculator", "expression"), ("python", "code")):
        tool = load_tool(name)
        assert tool.schema["function"]["parameters"]["required"] == [argument]
        assert len(tool.schema["function"]["description"]) > 30


def test_no_more_programs_run_at_a_time_than_there_are_cores() -> None:
    assert load_tool("python").max_concurrency == cores_of_rank() > 0
    assert load_tool("calculator").max_concurrency is None
