"""Compares times of day such as `11:00 a.m.`, which math-verify reads as ratios; that of 11 to 00 has no value."""

from __future__ import annotations

import re

from lightrl.rewards.answer_part import answer_part, behind_thoughts, without_commands

_HALF = r"(?: ?([AaPp])\.? ?[Mm]\b\.?)"
_TIME = re.compile(rf"(?<![\d:.])(\d{{1,2}}) ?: ?([0-5]\d)(?![\d:]){_HALF}?")
_TEXT = re.compile(r"\\(?:text(?:rm|bf)?|mathrm|mbox) *\{([^{}]*)\}")

Time = tuple[int, int, str]  # the hour, the minute, and a, p or nothing


def time_of(answer: str) -> Time | None:
    """Returns the time of day that an answer is; None for what may be a ratio, such as 3:10."""
    found = _TIME.fullmatch(without_commands(answer, _TEXT))
    time = _time(found) if found else None
    return time if time and (time[1] == 0 or time[2]) else None


def is_at(time: Time, text: str) -> bool:
    """Returns whether the time in the box or the tags of a response, or else its last one, is this one."""
    part = behind_thoughts(text)
    content = answer_part(part)
    times = [_time(found) for found in _TIME.finditer(without_commands(part if content is None else content, _TEXT))]
    if not times or (content is not None and len(times) > 1):
        return False
    hour, minute, half = times[-1]
    return (hour, minute) == time[:2] and (not half or not time[2] or half == time[2])


def _time(found: re.Match[str]) -> Time:
    return int(found[1]), int(found[2]), (found[3] or "").lower()
