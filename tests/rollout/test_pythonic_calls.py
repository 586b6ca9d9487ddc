"""Calls that are written as in Python, by LFM2 and by Llama 3.2 and 4."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightrl.rollout.tool_parsers import PARSERS
from lightrl.rollout.written_calls import ToolCall

PARSER = PARSERS["pythonic"]
ADD = ToolCall("add", {"a": 1, "b": [2]})


def marked(written: str) -> str:
    return f"<|tool_call_start|>{written}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        (f"So {marked('[add(a=1, b=[2])]')} it is.<|im_end|>", [ADD], "So  it is.<|im_end|>"),
        (f"{marked('[add(a=1, b=(2,)), now()]')}", [ADD, ToolCall("now", {})], ""),
        (f"{marked('[now()]')} and {marked('add(a=1, b=[2])')}", [ToolCall("now", {}), ADD], " and "),
        (f"{marked('[]')}", [], ""),
        ("[add(a=1, b=[2])]<|eot_id|>", [ADD], "<|eot_id|>"),
        ("<|python_start|>[\n  add(\n    a=1, b=[2]\n  )\n]<|python_end|><|eot|>", [ADD], "<|eot|>"),
        ("<think>[now()]</think>\n[add(a=1, b=[2])]", [ADD], "<think>[now()]</think>\n"),
        (f"<think>{marked('[now()]')}</think>{marked('[add(a=1, b=[2])]')}", [ADD], None),
        ("<think>[now()]</think>No.", [], "<think>[now()]</think>No."),
        # The chat template may have written the <think>.
        ("[now()] or [add(a=1)]?</think>[add(a=1, b=[2])]", [ADD], "[now()] or [add(a=1)]?</think>"),
        ("[now()]</think>No.", [], "[now()]</think>No."),
        ("[say(x='</think>[now()]')]", [ToolCall("say", {"x": "</think>[now()]"})], ""),
        ("In Python, [print(1)] is a list.", [], "In Python, [print(1)] is a list."),
        ("[print(1)]", [], "[print(1)]"),  # no name of an argument
        ("[add(a=1), 2]", [], "[add(a=1), 2]"),
        ("[add(a=1", [], "[add(a=1"),
        ("[1, 2]", [], "[1, 2]"),
    ],
)
def test_calls_and_what_is_left(text: str, calls: list[ToolCall], rest: str | None) -> None:
    found, left = PARSER.split(text)
    assert found == calls
    assert rest is None or left == rest


@pytest.mark.filterwarnings("error::SyntaxWarning", "error::DeprecationWarning")  # the latter in Python 3.11
@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"'it\'s\n\"so\"'", 'it\'s\n"so"'),
        ("'a]b<|im_end|>'", "a]b<|im_end|>"),
        (r"'\d+'", r"\d+"),  # of which Python warns
        ("-1.5", -1.5),
        ("None", None),
        ("True", True),
        ('{"x": true, "y": [null, {"z": false}], 1: ()}', {"x": True, "y": [None, {"z": False}], "1": []}),
    ],
)
def test_values(written: str, value: Any) -> None:
    for text in (marked(f"[weather.get(x={written})]"), f"[weather.get(x={written})]"):
        assert PARSER.calls_in(text) == [ToolCall("weather.get", {"x": value})]


@pytest.mark.parametrize(
    "written",
    [
        "[add(1)]",
        "[add(**{'a': 1})]",
        "[add(*[1])]",
        "add",
        "[add(a=b)]",
        "[add(a=open('x'))]",
        "[add(a={1, 2})]",
        "[add(a=1j)]",
        "[add(a=f'{1}')]",
        "[add(a=2**99)]",
        "[f(x)(a=1)]",
        "[add(a=1]",
        "[add(a='\0')]",
        "[" * 500,
        "[add(a=" + "-" * 100_000 + "1)]",
        "[add(a=" + "1+" * 100_000 + "1)]",
        "[add(a=" + "1" * 10_000 + ")]",
    ],
)
def test_what_is_no_call_is_answered_or_left(written: str) -> None:
    started = time.monotonic()
    (call,) = PARSER.calls_in(marked(written))
    assert call.problem.startswith("this call cannot be made: ")
    assert PARSER.calls_in(written) == []
    assert time.monotonic() - started < 5
