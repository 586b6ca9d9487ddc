"""Messages of a chat request: checked, compared with earlier ones, and given to the chat template."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.rollout.endpoint.errors import RequestError
from lightrl.rollout.endpoint.images import image_part, in_words, is_image
from lightrl.rollout.tool_parsers import PARSERS, Parser, typed_arguments
from lightrl.rollout.written_calls import ToolCall

_ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]


def checked_messages(value: Any) -> list[dict[str, Any]]:
    """Returns the messages; raises RequestError for anything that a chat cannot contain.

    The content of each is a text or, with images, a list of parts, in which no text follows another.
    """
    if not isinstance(value, list) or not value:
        raise RequestError("'messages' must be a list of at least one message.", param="messages")
    messages = [_checked(message, f"messages[{index}]") for index, message in enumerate(value)]
    _name_answers(messages)
    return messages


def _name_answers(messages: Sequence[dict[str, Any]]) -> None:
    """Gives answers of tools the names of the tools, which some templates demand and OpenAI's protocol leaves out."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        answered = str(message.get("tool_call_id"))
        if message["role"] == "tool" and answered in names:
            message.setdefault("name", names[answered])


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise RequestError(f"{where} must be an object whose role is one of {', '.join(_ROLES)}.", param=where)
    role = "system" if message["role"] == "developer" else message["role"]
    checked: dict[str, Any] = {"role": role, "content": _content_of(message.get("content"), where, role)}
    calls = message.get("tool_calls")
    if calls:
        checked["tool_calls"] = [_checked_call(call, f"{where}.tool_calls") for call in _as_list(calls, where)]
    return checked | {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}


def _as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{where}.tool_calls must be a list.", param=where)
    return value


def _content_of(content: Any, where: str, role: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content if isinstance(content, list) else [None]):
        if is_image(part) and role != "assistant":
            parts.append(image_part(part, f"{where}.content[{index}]"))
        elif not _is_text(part):
            raise RequestError(
                f"{where}.content must be a text or parts of type text and image_url; videos, sound, files and images "
                "of the assistant are not taken.",
                param=where,
            )
        elif parts and "text" in parts[-1]:
            parts[-1]["text"] += part["text"]
        else:
            parts.append({"type": "text", "text": part["text"]})
    texts = [part["text"] for part in parts if "text" in part]
    return "".join(texts) if len(texts) == len(parts) else parts


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have objects with function.name and function.arguments.", param=where)
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = arguments
    wanted = {"name": function["name"], "arguments": parsed}  # templates write the arguments as JSON themselves
    return {"id": str(call.get("id") or ""), "type": "function", "function": wanted}


def histories(messages: Sequence[Message], tools: Sequence[Any]) -> list[tuple[bytes, bytes]]:
    """Returns two names for the conversation up to each message: an exact one and a tolerant one.

    The tolerant name stays the same if a client strips texts or leaves out the names of tool calls.
    """
    exact = loose = _digest(b"", list(tools))
    names = []
    for message in map(in_words, messages):
        exact = _digest(exact, message)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        content = message["content"]
        loose = _digest(loose, [message["role"], content.strip() if isinstance(content, str) else content, calls])
        names.append((exact, loose))
    return names


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def answer_message(
    text: str, *, call_ids: str, tools: Sequence[Any], parser: Parser = PARSERS["hermes"], special: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the policy's message; tool calls that can be parsed are in tool_calls and not in the content.

    Args:
        text: What the policy said.
        call_ids: A text that no other answer has, from which the ids of its tool calls are made.
        tools: Those of the request; without tools a call is just text.
        parser: Finds the calls.
        special: Texts of special tokens, which may mark calls and are left out of the content.
    """
    calls, rest = parser.split(text) if tools else ([], text)
    if not calls or any(call.problem for call in calls):  # the agent should see calls that cannot be parsed
        return {"role": "assistant", "content": _without(special, text)}
    content = _without(special, rest).strip()
    ids = [call.id for call in calls]  # that the policy wrote, as Kimi K2 does, whose template reads them
    if not all(ids) or len(set(ids)) < len(ids):
        ids = [_call_id(call_ids, index) for index in range(len(calls))]
    listed = [
        {"id": own, "type": "function", "function": _function(call, tools)}
        for own, call in zip(ids, calls, strict=True)
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": listed}


def _without(special: Sequence[str], text: str) -> str:
    for mark in special:
        text = text.replace(mark, "")
    return text


def _call_id(call_ids: str, index: int) -> str:
    """Returns an id of nine letters and digits, as all chat templates take it; those of Mistral take no other."""
    digest = hashlib.blake2b(f"{call_ids} {index}".encode(), digest_size=10).digest()
    return base64.b32encode(digest).decode()[:9]


def _function(call: ToolCall, tools: Sequence[Any]) -> dict[str, str]:
    """Returns a call's name and its arguments as JSON, with the types that the request describes."""
    own = (tool for tool in tools if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping))
    described = next((tool for tool in own if tool["function"].get("name") == call.name), None)
    return {"name": call.name, "arguments": json.dumps(typed_arguments(call, described), ensure_ascii=False)}


def cut_before_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text up to the first of the stop strings."""
    ends = [end for end in (text.find(item) for item in stop) if end >= 0]
    return text[: min(ends)] if ends else text
