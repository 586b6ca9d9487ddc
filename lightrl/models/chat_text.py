"""Renders conversations by a chat template, with the tools that are described beside them and calls of these."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of a message, of which a template reads one or none
_THOUGHT_END = re.compile(r"</\w+>|\[/\w+\]")
_WORD = re.compile(r"\b(?!(?:system|user|assistant|tool)\b)\w+")  # names of roles are in other messages too
_WARNED_OF: set[str] = set()  # data sets and the warnings that have been given for them


def render(renderer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = (), **settings: Any) -> str:
    """Returns the text of a conversation; raises whatever the template raises.

    Templates expect the arguments of a tool call as an object. One that adds them to a text instead, such as that of
    DeepSeek-R1, gets them as JSON.
    """
    settings = {**settings, "tools": list(tools)} if tools else settings
    try:
        return str(renderer.apply_chat_template(list(messages), tokenize=False, **settings))
    except TypeError:
        written = [_with_calls(message, _as_json) for message in messages]
        if written == list(messages):
            raise
        return str(renderer.apply_chat_template(written, tokenize=False, **settings))


def with_readable_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls have objects as arguments, without null fields.

    In OpenAI's protocol arguments are JSON, which most templates would quote as a text. Columnar formats give every
    call the arguments of all other calls, as nulls.
    """
    return _with_calls(message, _as_object)


def tools_of(record: Mapping[str, Any], where: str = "") -> list[dict[str, Any]]:
    """Returns the tools that a record's field `tools` describes, a list of objects or its JSON; none for other data.

    where: the record's place, such as data.jsonl:1, for a warning about other data.
    """
    tools = _parsed(record["tools"]) if isinstance(record.get("tools"), str) else record.get("tools")
    if isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools):
        return list(_without_nulls(tools))
    if where and record.get("tools") not in (None, "", "null", {}):
        _warn_of_tools(where, record["tools"])
    return []


def warn_of_thoughts(message: Mapping[str, Any], rendered: str, where: str) -> None:
    """Warns if the text of a turn lacks the thought that its message holds beside the content."""
    for field in _THOUGHTS:
        thought = message.get(field)
        if isinstance(thought, str) and thought.strip() not in rendered:
            _warn_once(
                "%s: the chat template leaves out the %r of an answer, so it is learned without that thought. Rename "
                "the field to the one that the template reads, or write the thought into the content. Other records "
                "may be alike.",
                *(where, field),
            )


def warn_of_lost_messages(messages: Iterable[Mapping[str, Any]], rendered: str, where: str) -> None:
    """Warns of messages whose text the template left out, as many do with roles that they do not know.

    Answers are not looked at: templates leave out thoughts, and some leave out what is said beside a tool call.

    where: the record's place, such as data.jsonl:1, or "an episode".
    """
    for message in messages:
        if message.get("role") != "assistant" and _is_lost(_text_of(message.get("content")), rendered):
            _warn_once(
                "%s: the chat template leaves out the text of a message of the role %r, so that the model never reads "
                "it. Give the text to a role that the template writes there, such as user, or use a template that "
                "writes this one (for the policy --data.chat_template_file). Other messages may be affected, too.",
                *(where, message.get("role")),
            )


def warn_of_lost_answer(message: Mapping[str, Any], rendered: str, where: str) -> None:
    """Warns if the template left out an answer to be learned; a thought before it may be missing."""
    answer = _THOUGHT_END.split(_text_of(message.get("content")))[-1]
    if _is_lost(answer, rendered):
        _warn_once(
            "%s: the chat template leaves out the answer %.80r, so it is not learned. Use a template that writes it "
            "(--data.chat_template_file). Other records may be affected, too.",
            *(where, answer.strip()),
        )


def _is_lost(text: str, rendered: str) -> bool:
    """Returns whether a rendered text has neither the text nor its longest word: templates trim texts or write JSON."""
    return text not in rendered and max(_WORD.findall(text), key=len, default="") not in rendered


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _warn_of_tools(where: str, tools: object) -> None:
    _warn_once(
        "%s: 'tools' is %.80r, and neither a list of objects nor its JSON, so the chat template is given no tools. "
        "Correct it, or rename the field if it describes none. Other records may be alike.",
        *(where, tools),
    )


def _warn_once(text: str, where: str, found: object) -> None:
    """Warns of a record, unless the same warning was given for another record of its data set."""
    subject = f"{where.rpartition(':')[0]}{text}"
    if subject not in _WARNED_OF and os.environ.get("RANK", "0") == "0":
        _WARNED_OF.add(subject)
        logger.warning(text, where, found)


def called_names(message: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tools that a message calls."""
    calls = message.get("tool_calls")
    listed = [call for call in (calls if isinstance(calls, list) else []) if isinstance(call, Mapping)]
    functions = [call["function"] if isinstance(call.get("function"), Mapping) else call for call in listed]
    return [name for function in functions if isinstance(name := function.get("name"), str)]


def _with_calls(message: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_arguments(call, convert) for call in calls]}


def _with_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    if not isinstance(call, Mapping):
        return call
    given = {key: value for key, value in call.items() if value is not None}
    if isinstance(given.get("function"), Mapping):
        return {**given, "function": _with_arguments(given["function"], convert)}
    return {**given, "arguments": convert(given["arguments"])} if "arguments" in given else given


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return _without_nulls(arguments)
    parsed = _parsed(arguments)
    return parsed if isinstance(parsed, Mapping) else arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
