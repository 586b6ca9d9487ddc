"""Calls as policies write them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightrl.rollout.tool_parsers import ToolCall, hermes_calls, json_calls, python_calls, split_hermes, typed_arguments

ADD = {"a": 1, "b": [2]}
WRITTEN = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'


def test_hermes() -> None:
    text = f'So: <tool_call>\n{WRITTEN}\n</tool_call><tool_call>{{"name": "now"}}</tool_call> {WRITTEN}'
    assert hermes_calls(text) == [ToolCall("add", ADD), ToolCall("now", {})]
    assert hermes_calls("<tool_call>no end") == []
    assert split_hermes("a<tool_call>b</tool_call>c<tool_call>d") == (["b"], "ac<tool_call>d")


def test_calls_in_thoughts_are_drafts() -> None:
    call = f"<tool_call>{WRITTEN}</tool_call>"
    for thought in ("<think>I could write {}, or not.</think>", "{}</think>", "<think>By <tool_call> it is.</think>"):
        before = f"{thought.format(call)}Now "
        assert split_hermes(f"{before}{call}.{call}") == ([WRITTEN, WRITTEN], f"{before}.")
        assert split_hermes(before) == ([], before)
        assert split_hermes(f"{before}{call}<think>") == ([WRITTEN], f"{before}<think>")
    assert split_hermes(f"a{call}b<think>{call}</think>c{call}d") == ([WRITTEN, WRITTEN], f"ab<think>{call}</think>cd")
    said = '{"name": "say", "arguments": {"text": "a</think>b"}}'
    assert split_hermes(f"<tool_call>{said}</tool_call>") == ([said], "")
    unfinished = f"<think>{call}"  # cut off, or a template's own way to call
    assert split_hermes(unfinished) == ([WRITTEN], "<think>")


def tags(inside: str) -> str:
    return f"<tool_call>\n{inside}\n</tool_call>"


def test_calls_in_tags() -> None:
    code = "<parameter=code>\n\nif a < b:\n  c\n\n</parameter>"
    written = f"<function=add>\n<parameter=a>\n1\n</parameter>\n{code}\n</function>"
    assert hermes_calls(tags(written)) == [
        ToolCall("add", {"a": "1", "code": "\nif a < b:\n  c\n"}, has_texts=True)  # without one line break at each end
    ]
    assert hermes_calls(tags("<function=now></function>")) == [ToolCall("now", {}, has_texts=True)]
    for wrong, problem in (
        ("<function=add><parameter=a>1</parameter>", "ends with </function>"),
        ("<function=add>a</function>", "a call holds only"),
        ("<function=add><parameter=a>1</parameter><parameter=b>2</function>", "a call holds only"),
    ):
        (call,) = hermes_calls(tags(wrong))
        assert problem in call.problem


def test_texts_get_the_types_of_the_description() -> None:
    texts = {"a": "1", "b": "1", "c": "[1, 2]", "d": "True", "e": "x", "f": "null", "g": "2"}
    properties: dict[str, Any] = {
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "f": {"type": ["string", "null"]},
        "g": "odd",
    }
    described = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    typed = {"a": 1, "b": "1", "c": [1, 2], "d": True, "e": "x", "f": None, "g": 2}
    assert typed_arguments(ToolCall("f", dict(texts), has_texts=True), described) == typed
    assert typed_arguments(ToolCall("f", dict(texts), has_texts=True), None) == {**typed, "b": 1}
    assert typed_arguments(ToolCall("f", dict(texts)), described) == texts
    for key in ("anyOf", "oneOf"):
        for kind, value in (("string", "1"), ("integer", 1)):
            properties["b"] = {key: [{"type": kind}, {"type": "null"}]}
            assert typed_arguments(ToolCall("f", {"b": "1"}, has_texts=True), described) == {"b": value}
            assert typed_arguments(ToolCall("f", {"b": "null"}, has_texts=True), described) == {"b": None}
    for kind, text, value in (("array", '["a"]', ["a"]), ("object", "{}", {}), ("array", "{}", "{}"), (None, "x", "x")):
        properties["b"] = {"anyOf": [{"type": "string"}, {"type": kind}]}
        assert typed_arguments(ToolCall("f", {"b": text}, has_texts=True), described) == {"b": value}


def test_a_turn_that_repeats_one_token_is_read_at_once() -> None:
    text = f"<tool_call>{WRITTEN}</tool_call>" + "<tool_call>\n" * 20_000  # a search from each takes 50 seconds
    began = time.monotonic()
    assert hermes_calls(text) == [ToolCall("add", ADD)]
    assert time.monotonic() - began < 1
    many = "<parameter=a>\n" * 20_000
    assert hermes_calls(tags(f"<function=add>{many}</function>"))[0].problem
    assert hermes_calls(tags(f"<function=add>{many}</parameter></function>"))[0].name == "add"
    assert hermes_calls(tags("<function=add>" + "<parameter=" * 10_000 + "</parameter></function>"))[0].problem
    assert time.monotonic() - began < 1
    for repeated in ("[" * 30_000, '{"a":' * 10_000):  # from each of them: a second
        assert json_calls(f"{WRITTEN} {repeated} {WRITTEN}") == [ToolCall("add", ADD)]
    began = time.monotonic()
    assert json_calls("{" * 100_000 + WRITTEN) == [ToolCall("add", ADD)]
    assert time.monotonic() - began < 1
    cpu_began = time.process_time()
    assert json_calls("[not JSON]" * 100_000 + WRITTEN) == [ToolCall("add", ADD)]  # each error counts lines
    assert time.process_time() - cpu_began < 2


def test_json() -> None:
    assert json_calls(f"So: {WRITTEN} and then") == [ToolCall("add", ADD)]
    assert json_calls(f'```json\n[{WRITTEN}, {{"name": "now", "parameters": {{}}}}]\n```') == [
        ToolCall("add", ADD),
        ToolCall("now", {}),
    ]
    # Arguments as a text, as some write them; objects without both, and half an object, are no calls.
    assert json_calls('{"name": "add", "arguments": "{\\"a\\": 1}"}') == [ToolCall("add", {"a": 1})]
    assert json_calls('{"a": 1} [1, 2] {"name": "Ada", "age": 36} {"name": "add", {oops') == []


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
