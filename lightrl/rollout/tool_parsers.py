"""Finds the tool calls in a policy's text. Each parser knows one notation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_HERMES_BEGIN, _HERMES_END = "<tool_call>", "</tool_call>"
_HERMES = re.compile(rf"{_HERMES_BEGIN}(.*?){_HERMES_END}", re.DOTALL)
_THOUGHT_BEGIN, _THOUGHT_END = "<think>", "</think>"
_TAGS = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER_END = "</parameter>"
_PARAMETER = re.compile(rf"<parameter=([^<>\n]+)>\n?(.*?)\n?{_PARAMETER_END}", re.DOTALL)
_LITERALS = {"True": True, "False": False, "None": None}  # as some policies write them
_PYTHON = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL)
_OPENING = re.compile(r'\{\s*["}]|\[')  # nothing else begins JSON, and every failure to read it searches for its line
_DECODER = json.JSONDecoder()
_MAX_COUNTED = 4096  # characters before an opening; an error counts their lines, of all the text for each opening
_MAX_SHOWN = 200  # characters of a bad call that are quoted in its answer


class ToolCall(NamedTuple):
    """A call as the policy wrote it."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""  # why the call cannot be made, which is then its answer
    has_texts: bool = False  # whether the arguments are texts, to which the tool's description gives types
    id: str = ""  # by which the answer refers to the call, if the notation has the policy write one


def hermes_calls(text: str) -> list[ToolCall]:
    """Finds calls like `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the notation of Hermes and Qwen.

    What stands inside may also be `<function=add><parameter=a>1</parameter></function>`, as newer models of Qwen write.
    """
    return [call_in(written) for written in split_hermes(text)[0]]


def split_hermes(text: str) -> tuple[list[str], str]:
    """Returns what stands in each `<tool_call>...</tool_call>` outside the turn's thoughts, and the text without these.

    Behind the last end nothing is searched: a turn that only repeats the beginning would take seconds.
    """
    begin, end = _thoughts(text)
    found, rests = [], []
    for part in (text[:begin], text[end:]):
        stop = part.rfind(_HERMES_END) + len(_HERMES_END)
        searched = part[:stop] if stop >= len(_HERMES_END) else ""
        found += _HERMES.findall(searched)
        rests.append(_HERMES.sub("", searched) + part[len(searched) :])
    return found, rests[0] + text[begin:end] + rests[1]


def _thoughts(text: str) -> tuple[int, int]:
    """Returns where the turn's thoughts begin and end: calls in them are drafts, and may lack their end.

    Without <think> they begin with the turn, as where the chat template has written it. An argument may contain
    </think> too: then a call has begun before it, and ends behind it before another begins.
    """
    end = text.find(_THOUGHT_END) + len(_THOUGHT_END)
    if end < len(_THOUGHT_END):
        return 0, 0
    has_begun = text.rfind(_HERMES_BEGIN, 0, end) > text.rfind(_HERMES_END, 0, end)
    closed = text.find(_HERMES_END, end)
    if has_begun and closed >= 0 and text.find(_HERMES_BEGIN, end, closed) < 0:
        return 0, 0
    return max(text.find(_THOUGHT_BEGIN, 0, end), 0), end


def call_in(written: str) -> ToolCall:
    """Reads what stands in `<tool_call>...</tool_call>`."""
    return _from_tags(written) if written.lstrip().startswith("<function=") else _from_json(written)


def json_calls(text: str) -> list[ToolCall]:
    """Finds JSON objects with a name and arguments or parameters, as Llama writes them; other JSON is plain text."""
    return [_from_object(found, str(found)) for found in _json_objects(text) if _is_call(found)]


def _is_call(found: Mapping[str, Any]) -> bool:
    return "name" in found and ("arguments" in found or "parameters" in found)


def python_calls(text: str) -> list[ToolCall]:
    """Finds ```python blocks, each of which is a call of the tool `python` with that code."""
    return [ToolCall("python", {"code": code}) for code in _PYTHON.findall(text)]


PARSERS: dict[str, Callable[[str], list[ToolCall]]] = {
    "hermes": hermes_calls,
    "json": json_calls,
    "python": python_calls,
}


def typed_arguments(call: ToolCall, description: Any) -> dict[str, Any]:
    """Returns a call's arguments; those that are texts get the types that the description of the tool gives them."""
    if not call.has_texts:
        return call.arguments
    properties = description
    for key in ("function", "parameters", "properties"):
        properties = properties.get(key) if isinstance(properties, Mapping) else None
    known = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(text, known.get(name)) for name, text in call.arguments.items()}


def _typed(text: str, description: Any) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _LITERALS.get(text.strip(), text)
    kinds = set(_kinds(description))
    own = {type(None): "null", list: "array", dict: "object"}.get(type(value))
    # 123 may be a text, but where null, a list or an object may stand too, nobody means a text by one.
    return text if "string" in kinds and own not in kinds else value


def _kinds(description: Any) -> Iterator[str]:
    """Yields the types that a description allows; pydantic, and so many MCP servers, write alternatives as anyOf."""
    if isinstance(description, Mapping):
        kinds = description.get("type")
        yield from (kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
        for key in ("anyOf", "oneOf"):
            options = description.get(key)
            for option in options if isinstance(options, list) else ():
                yield from _kinds(option)


def _from_tags(written: str) -> ToolCall:
    found = _TAGS.fullmatch(written)
    if found is None:
        return bad_call(written, ValueError("a call that begins with <function=...> ends with </function>"))
    name, body = found.groups()
    end = body.rfind(_PARAMETER_END) + len(_PARAMETER_END)  # behind it nothing is searched, as in split_hermes()
    if (_PARAMETER.sub("", body[:end]) + body[end:]).strip():
        return bad_call(written, ValueError("a call holds only <parameter=...>...</parameter>"))
    return ToolCall(name.strip(), dict(_PARAMETER.findall(body, 0, end)), has_texts=True)


def _from_json(written: str) -> ToolCall:
    try:
        wanted = json.loads(written)
    except (ValueError, RecursionError) as error:
        return bad_call(written, error)
    return _from_object(wanted, written)


def _from_object(wanted: Any, written: str) -> ToolCall:
    try:
        if not isinstance(wanted, dict):
            raise TypeError("a call is an object with a name and arguments")
        arguments = wanted.get("arguments", wanted.get("parameters", {}))
        name, arguments = wanted["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("the name is a text and the arguments are an object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return bad_call(written, error)
    return ToolCall(name, arguments)


def _json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Returns the outermost JSON objects of a text, including those in outermost lists."""
    index = 0
    while (index := _next_opening(text, index)) < len(text):
        if index > _MAX_COUNTED:
            text, index = text[index:], 0
        try:
            found, index = _DECODER.raw_decode(text, index)
        except RecursionError:  # a turn that only opens brackets; a search from each would take seconds
            return
        except ValueError:
            index += 1
            continue
        yield from (item for item in (found if isinstance(found, list) else [found]) if isinstance(item, dict))


def _next_opening(text: str, start: int) -> int:
    found = _OPENING.search(text, start)
    return found.start() if found else len(text)


def bad_call(written: str, error: Exception) -> ToolCall:
    """Returns a ToolCall that cannot be made, with the reason."""
    return ToolCall(
        "", {}, f"this call cannot be made: {written.strip()[:_MAX_SHOWN]} ({type(error).__name__}: {error})"
    )
