"""Finds tool calls that are written as in Python, in a list such as `[add(a=1, b=2)]`."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from lightrl.rollout.written_calls import THOUGHT, Found, ToolCall, bad_call, marked, without_drafts

_LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
PYTHONIC_MARKS = (*_LFM2, "<|python_start|>", "<|python_end|>")
_BEGIN = re.compile(r"\s*(?:<\|python_start\|>\s*)?(\[\s*[A-Za-z_][\w.]*\()")
_JSON_NAMES = {"true": True, "false": False, "null": None}  # chat templates write what is nested as JSON
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)  # that ast raises for the text of a policy


def pythonic_calls(text: str) -> list[Found]:
    """Finds lists of calls between the marks of LFM2, or the list that is a whole turn, as Llama 3.2 and 4 write it."""
    return [Found(*match.span(), _read_marked(match[1])) for match in marked(text, _LFM2)] or _whole_turn(text)


def _read_marked(written: str) -> list[ToolCall]:
    try:
        return _read(written)
    except _UNREADABLE as error:
        return [bad_call(written, error)]


def _whole_turn(text: str) -> list[Found]:
    """Finds a list of calls at the start of a turn, after its thoughts; any other text is plain text."""
    _, mark, answer = text.partition(THOUGHT[1])
    found = _list_at(text, len(text) - len(answer)) if mark else []
    return found or without_drafts(text, _list_at(text, 0))  # an argument may contain </think>


def _list_at(text: str, index: int) -> list[Found]:
    begin = _BEGIN.match(text, index)
    if begin is None:
        return []
    start, stop = begin.start(1), text.rfind("]") + 1
    try:
        return [Found(start, stop, _read(text[start:stop]))]
    except _UNREADABLE:
        return []


def _read(written: str) -> list[ToolCall]:
    """Reads a list of calls; nothing of it runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes such as \d, which stay as they are
        tree = ast.parse(written.strip(), mode="eval").body
    return [_call(item) for item in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _call(node: ast.expr) -> ToolCall:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and not node.args:
        arguments = {pair.arg: _value(pair.value) for pair in node.keywords if pair.arg}
        if len(arguments) == len(node.keywords):
            return ToolCall(ast.unparse(node.func), arguments)
    raise ValueError("calls are a list of NAME(ARGUMENT=VALUE)")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)  # of `**other` the key is None, and is left out
        return {str(ast.literal_eval(key)): _value(value) for key, value in pairs if key}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError(f"{ast.unparse(node)} is no value of JSON")
    return value
