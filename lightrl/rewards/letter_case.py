"""Keeps variables apart that differ in their case only, such as R and r, which math-verify reads as one."""

from __future__ import annotations

import re

_TEXT = r"\\(?:(?:text|operatorname) *\{[^{}]{2,}\}|math(?:bb|cal) *\{[^{}]*\}|[A-Za-z]+)"  # no variables
_LETTER = re.compile(rf"{_TEXT}|([A-Za-z])")
_WORD = re.compile(r"(?:\\text *\{ *)?[A-Z]?[a-z]+ *\}?")
_SPARE = "qwvupzkjrbyxn"  # without the letters of units, which math-verify drops at the end


def with_own_letters(one: str, other: str) -> tuple[str, str]:
    """Returns two expressions with a letter of its own for each capital whose small letter also stands in one of them.

    Words stay as they are: `Yes` is `yes`.
    """
    letters = {found[1] for text in (one, other) for found in _LETTER.finditer(text) if found[1]}
    mixed = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    if not mixed or all(len(text) > 1 and _WORD.fullmatch(text) for text in (one, other)):
        return one, other
    spare = [letter for letter in _SPARE if letter not in letters and letter.upper() not in letters]
    names = dict(zip(mixed, spare, strict=False))
    renamed = [_LETTER.sub(lambda found: names.get(found[0], found[0]), text) for text in (one, other)]
    return renamed[0], renamed[1]
