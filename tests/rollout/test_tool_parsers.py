"""Calls as policies write them."""

from __future__ import annotations

import time

import pytest

from lightrl.rollout.tool_parsers import ToolCall, hermes_calls, json_calls, python_calls, split_hermes

ADD = {"a": 1, "b": [2]}
WRITTEN = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'


def test_hermes() -> None:
    text = f'So: <tool_call>\n{WRITTEN}\n</tool_call><tool_call>{{"name": "now"}}</tool_call> {WRITTEN}'
    assert hermes_calls(text) == [ToolCall("add", ADD), ToolCall("now", {})]
    assert hermes_calls("<tool_call>no end") == []
    assert split_hermes("a<tool_call>b</tool_call>c<tool_call>d") == (["b"], "ac<tool_call>d")


def test_a_turn_that_repeats_one_token_is_read_at_once() -> None:
    text = f"<tool_call>{WRITTEN}</tool_call>" + "<tool_call>\n" * 20_000  # a search from each takes 50 seconds
    began = time.monotonic()
    assert hermes_calls(text) == [ToolCall("add", ADD)]
    assert time.monotonic() - began < 1
    for repeated in ("[" * 30_000, '{"a":' * 10_000):  # from each of them: a second
        assert json_calls(f"{WRITTEN} {repeated} {WRITTEN}") == [ToolCall("add", ADD)]


def test_json() -> None:
    assert json_calls(f"So: {WRITTEN} and then") == [ToolCall("add", ADD)]
    assert json_calls(f'```json\n[{WRITTEN}, {{"name": "now", "parameters": {{}}}}]\n```') == [
        ToolCall("add", ADD),
        ToolCall("now", {}),
    ]
    # Arguments as a text, as some write them; objects without a name, and half an object, are no calls.
    assert json_calls('{"name": "add", "arguments": "{\\"a\\": 1}"}') == [ToolCall("add", {"a": 1})]
    assert json_calls('{"a": 1} [1, 2] {"name": "add", {oops') == []


def test_python() -> None:
    text = "First\n```python\nprint(1)\n```\nthen\n```py\nprint(2)\n```\n```\nprint(3)\n```"
    assert python_calls(text) == [
        ToolCall("python", {"code": "print(1)\n"}),
        ToolCall("python", {"code": "print(2)\n"}),
    ]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{oops", "JSONDecodeError"),
        ("[1]", "a call is an object with a name and arguments"),
        ('{"arguments": {}}', "KeyError: 'name'"),
        ('{"name": "add", "arguments": [1]}', "the arguments are an object"),
        ('{"name": 3}', "the name is a text"),
        ("[" * 5_000, "this call cannot be made: [[["),
    ],
)
def test_a_call_that_cannot_be_read_says_why(written: str, problem: str) -> None:
    (found,) = hermes_calls(f"<tool_call>{written}</tool_call>")
    assert problem in found.problem
    assert len(found.problem) < 500
