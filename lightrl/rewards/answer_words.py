"""Finds words that make another answer of a number beside them, such as `not 5` and `5 or more`."""

from __future__ import annotations

import re

from lightrl.rewards.answer_part import answer_part, behind_thoughts

_IN_TEXT = re.compile(r"\\(?:text(?:bf|rm|it)?|mathrm|mbox) *\{([^{}]*)\}")
_NUMBER_NEXT = r"(?: equal to| exactly)?[\s$*(]*(?=[-+]?[\d.\\])"
_DENIED = re.compile(rf"(?:\b(?:not|never|neither)|n't){_NUMBER_NEXT}", re.IGNORECASE)
_BOUNDED = re.compile(
    rf"\b(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|other) than|half of|twice){_NUMBER_NEXT}"
    r"|[\d})$*]\s*(?:(?:or|and) (?:more|less|fewer|greater|above|below|over|under)"
    r"|(?:is|are) (?:not|wrong|incorrect|false)|(?:is|are)n't|squared|cubed)\b",
    re.IGNORECASE,
)
_END = re.compile(r"[^\n]{0,60}\Z")


def is_qualified(text: str) -> bool:
    """Returns whether the answer in a box or in tags is a number with such words, or a plain text denies its last."""
    part = behind_thoughts(text)
    content = answer_part(part)
    if content is None:
        end = _END.search(part.rstrip())
        denials = list(_DENIED.finditer(end[0])) if end else []
        return bool(denials) and len(re.findall(r"[\d.]*\d", end[0][denials[-1].end() :] if end else "")) == 1
    plain = _IN_TEXT.sub(r" \1 ", content)
    return bool(_DENIED.search(plain) or _BOUNDED.search(plain))
