"""Finds words that make another answer of a number beside them, such as `not 5` and `5 or more`."""

from __future__ import annotations

import re

from lightrl.rewards.answer_part import answer_part, behind_thoughts

_IN_TEXT = re.compile(r"\\(?:text(?:bf|rm|it)?|mathrm|mbox) *\{([^{}]*)\}")
_NUMBER_NEXT = r"(?: equal to| exactly)?[\s$*(]*(?=[-+]?[\d.\\])"
_DENIED = re.compile(rf"(?:\b(?:not|never|neither)|n't){_NUMBER_NEXT}", re.IGNORECASE)
_DERIVED = re.compile(
    rf"(?:\b(?:half|third|quarter|square|cube|root|reciprocal|inverse|negative|opposite|double|triple) of|\btwice)"
    rf"{_NUMBER_NEXT}"
    r"|\d[})$*]*\s*(?:squared|cubed)\b(?! *[a-z])",
    re.IGNORECASE,
)
_BOUNDED = re.compile(
    rf"\b(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|other) than){_NUMBER_NEXT}"
    r"|[\d})$*]\s*(?:(?:or|and) (?:more|less|fewer|greater|above|below|over|under)"
    r"|(?:is|are) (?:not|wrong|incorrect|false)|(?:is|are)n't)\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[\d.]*\d")
_END = re.compile(r"[^\n]{0,60}\Z")


def is_qualified(text: str) -> bool:
    """Returns whether the answer in a box or in tags is a number with such words, or a plain text denies its last."""
    part = behind_thoughts(text)
    content = answer_part(part)
    if content is None:
        end = _END.search(part.rstrip())
        return end is not None and _is_about_last_number(end[0])
    plain = _IN_TEXT.sub(r" \1 ", content)
    return any(pattern.search(plain) for pattern in (_DENIED, _DERIVED, _BOUNDED))


def _is_about_last_number(end: str) -> bool:
    """Returns whether the last number of a text is denied, or what is derived from it is the answer."""
    for pattern in (_DENIED, _DERIVED):
        words = list(pattern.finditer(end))
        rest = end[words[-1].end() :] if words else ""
        if words and len(_NUMBER.findall(rest)) == (0 if words[-1][0][0].isdigit() else 1):
            return True
    return False
