"""A tool call as a policy writes it, and where calls stand in the text of a turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

THOUGHT = ("<think>", "</think>")
_MOST_MARKS = 8  # of the end of a call that are taken for parts of its texts
_IS_CUT = "Unterminated string"  # what Python's json says of a text without an end
_MAX_SHOWN = 200  # characters of a bad call that are quoted in its answer


class ToolCall(NamedTuple):
    """A call as the policy wrote it."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""  # why the call cannot be made, which is then its answer
    has_texts: bool = False  # whether the arguments are texts, to which the tool's description gives types
    id: str = ""  # by which the answer refers to the call, if the notation has the policy write one


class Found(NamedTuple):
    """A place in a text that holds calls."""

    start: int
    stop: int
    calls: list[ToolCall]


def bad_call(written: str, error: Exception) -> ToolCall:
    """Returns a ToolCall that cannot be made, with the reason."""
    return ToolCall(
        "", {}, f"this call cannot be made: {written.strip()[:_MAX_SHOWN]} ({type(error).__name__}: {error})"
    )


def marked_calls(
    text: str, marks: tuple[str, str], read: Callable[[str], ToolCall], thought: tuple[str, str] = THOUGHT
) -> list[Found]:
    """Returns the calls between two marks outside the turn's thoughts, as `read` reads what stands between."""
    found, done = list[Found](), 0
    for match in marked(text, marks, thought):
        if match.start() >= done:
            call, done = _whole_call(text, match, marks[1], read)
            found.append(Found(match.start(), done, [call]))
    return found


def _whole_call(text: str, match: re.Match[str], mark: str, read: Callable[[str], ToolCall]) -> tuple[ToolCall, int]:
    """Returns a call and where it ends: at the first mark, or at a later one if a text of its JSON holds the first."""
    first = call = read(match[1])
    stop = match.end()
    for _ in range(_MOST_MARKS):
        end = text.find(mark, stop)
        if _IS_CUT not in call.problem or end < 0:
            break
        call, stop = read(text[match.start(1) : end]), end + len(mark)
    return (first, match.end()) if call.problem else (call, stop)


def marked(text: str, marks: tuple[str, str], thought: tuple[str, str] = THOUGHT) -> Iterator[re.Match[str]]:
    """Yields a match for each text between two marks, its only group, outside the turn's thoughts.

    Behind the last end nothing is searched: a turn that only repeats the beginning would take seconds.
    """
    pattern, last = re.compile("{}(.*?){}".format(*map(re.escape, marks)), re.DOTALL), marks[1]
    begin, end = _thoughts(text, marks, thought)
    for low, high in ((0, begin), (end, len(text))):
        stop = text.rfind(last, low, high) + len(last)
        if stop >= low + len(last):
            yield from pattern.finditer(text, low, stop)


def _thoughts(text: str, marks: tuple[str, str], thought: tuple[str, str]) -> tuple[int, int]:
    """Returns where the turn's thoughts begin and end: calls in them are drafts, and may lack their end.

    Without <think> they begin with the turn, as where the chat template has written it. An argument may contain
    </think> too: then a call has begun before it, and ends behind it before another begins.
    """
    begin_mark, end_mark = marks
    end = text.find(thought[1]) + len(thought[1])
    if end < len(thought[1]):
        return 0, 0
    has_begun = text.rfind(begin_mark, 0, end) > text.rfind(end_mark, 0, end)
    closed = text.find(end_mark, end)
    if has_begun and closed >= 0 and text.find(begin_mark, end, closed) < 0:
        return 0, 0
    return max(text.find(thought[0], 0, end), 0), end


def without_drafts(text: str, found: list[Found], marks: tuple[str, str] = THOUGHT) -> list[Found]:
    """Leaves out what was found in the turn's thoughts, as _thoughts() does for calls whose end has a mark."""
    end = text.find(marks[1])
    if end < 0 or any(item.start < end < item.stop for item in found):
        return found
    begin = max(text.find(marks[0], 0, end), 0)
    return [item for item in found if not begin <= item.start < end]
