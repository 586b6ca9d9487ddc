"""Messages as clients write them."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.rollout.endpoint.errors import RequestError
from lightrl.rollout.endpoint.messages import answer_message, checked_messages, cut_before_stop, histories
from lightrl.rollout.tool_parsers import PARSERS

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "'messages' must be a list"),
        ([], "at least one message"),
        ([{"role": "robot", "content": ""}], r"messages\[0\] must be an object whose role is one of system"),
        (
            [{"role": "user", "content": [{"type": "video_url"}]}],
            "parts of type text and image_url; videos",
        ),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "images of the assistant are not taken"),
        ([{"role": "user", "content": 3}], "must be a text"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "function.name"),
        ([{"role": "assistant", "tool_calls": {"id": "x"}}], "must be a list"),
    ],
)
def test_a_bad_message_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked_messages(value)


def names(*messages: dict[str, Any]) -> tuple[bytes, bytes]:
    return histories(checked_messages(list(messages)), ())[-1]


def test_the_same_history_has_the_same_name_however_it_is_written() -> None:
    said = answer_message(' x <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', call_ids="c", tools=[TOOL])
    assert said["content"] == "x"
    call = said["tool_calls"][0]
    assert call == {"id": "L5KKUC6SA", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    spaced = {**said, "content": [{"type": "text", "text": "x"}], "refusal": None}
    spaced["tool_calls"] = [{**call, "function": {"name": "f", "arguments": '{ "a":1 }'}}]
    assert names(said) == names(spaced)
    renamed = {**said, "content": "x ", "tool_calls": [{**call, "id": "other"}]}
    assert names(said)[0] != names(renamed)[0]
    assert names(said)[1] == names(renamed)[1]
    assert names({**said, "content": "y"})[1] != names(said)[1]


def test_an_answer_has_the_name_of_the_tool_for_templates_that_demand_it() -> None:
    call = {"id": "abc", "function": {"name": "f"}}
    answers: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "abc", "content": "7"},
        {"role": "tool", "tool_call_id": "abc", "content": "7", "name": "own"},
        {"role": "tool", "tool_call_id": "other", "content": "7"},
        {"role": "tool", "tool_call_id": ["abc"], "content": "7"},
    ]
    found = checked_messages([{"role": "assistant", "tool_calls": [call]}, *answers])
    assert [message.get("name") for message in found] == [None, "f", "own", None, None]


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>{</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call><tool_call>?</tool_call>',
    ],
)
def test_what_is_no_call_stays_a_text(text: str) -> None:
    assert answer_message(text, call_ids="c", tools=[TOOL]) == {"role": "assistant", "content": text}


def test_without_tools_a_call_is_a_text() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert answer_message(text, call_ids="c", tools=[])["content"] == text


def test_the_text_ends_before_the_first_stop() -> None:
    assert cut_before_stop("abcd", ["d", "c"]) == "ab"
    assert cut_before_stop("abcd", ["x"]) == "abcd"


def test_arguments_may_be_written_as_a_text() -> None:
    written = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    (call,) = answer_message(written, call_ids="c", tools=[TOOL])["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    bad = written.replace("1}", "1")
    assert answer_message(bad, call_ids="c", tools=[TOOL]) == {"role": "assistant", "content": bad}


def test_a_call_in_tags_has_the_types_of_the_request() -> None:
    """As Qwen3-Coder and later models write calls: all values are texts."""
    written = (
        "So\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    said = answer_message(written, call_ids="c", tools=[{"name": "f"}, "no tool", TOOL])
    assert said["content"] == "So"
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1, "b": "2"}'}
    (unknown,) = answer_message(written.replace("=f>", "=g>"), call_ids="c", tools=[TOOL])["tool_calls"]
    assert unknown["function"] == {"name": "g", "arguments": '{"a": 1, "b": 2}'}
    cut = written.replace("</function>", "")
    assert answer_message(cut, call_ids="c", tools=[TOOL]) == {"role": "assistant", "content": cut}


OPEN, SHUT = "<\uff5ctool\u2581call\u2581", "\uff5c>"  # the beginning and the end of DeepSeek's tokens


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("json", 'So {"name": "f", "arguments": {"a": 1}}', "So"),
        ("llama", '<function=f>{"a": 1}</function>', None),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', None),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}</s>', None),
        ("mistral", 'So[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]</s>', "So"),
        (
            "glm",
            "<think>f?</think>\n<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
            "<think>f?</think>",
        ),
        (
            "kimi",
            "So<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            "So",
        ),
        (
            "deepseek",
            f'{OPEN.replace("call", "calls")}begin{SHUT}{OPEN}begin{SHUT}f<\uff5ctool\u2581sep{SHUT}{{"a": 1}}'
            f"{OPEN}end{SHUT}{OPEN.replace('call', 'calls')}end{SHUT}</s>",
            None,
        ),
    ],
)
def test_calls_are_read_in_the_notation_of_the_model(parser: str, text: str, content: str | None) -> None:
    settings: Any = {"call_ids": "c", "parser": PARSERS[parser], "special": ["[TOOL_CALLS]", "[ARGS]", "</s>"]}
    said = answer_message(text, tools=[TOOL], **settings)
    assert said["content"] == content
    (call,) = said["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert call["id"] == ("functions.f:3" if parser == "kimi" else "L5KKUC6SA")  # Kimi K2 writes ids itself
    without = answer_message(text, tools=[], **settings)["content"]
    assert without == text.replace("[TOOL_CALLS]", "").replace("[ARGS]", "").replace("</s>", "")
    assert answer_message(text.replace("1", "{"), tools=[TOOL], **settings).get("tool_calls") is None or parser == "glm"


def test_an_id_that_a_policy_writes_twice_is_not_taken_over() -> None:
    written = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    said = answer_message(written * 2, call_ids="c", tools=[TOOL], parser=PARSERS["kimi"])
    assert len({call["id"] for call in said["tool_calls"]}) == 2
