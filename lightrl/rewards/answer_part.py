r"""Finds the part of a response that holds its answer: the last \boxed{} or <answer>."""

from __future__ import annotations

import re

END_OF_THOUGHTS = "</think>"
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_SPACE = re.compile(r"(?:\s|~|\\[,;:! ]|[$])+")
_BOX = re.compile(r"\\(?:boxed|fbox) *\{")


def behind_thoughts(text: str) -> str:
    """Returns the text after the thoughts, or the whole text if nothing follows them."""
    part = text.rpartition(END_OF_THOUGHTS)[2]
    return part if part.strip() else text


def answer_part(text: str) -> str | None:
    """Returns the content of the last box, or else of the last tags; None if the text has neither."""
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _content(text, boxes[-1].end())
    tagged = TAGGED.findall(text)
    return str(tagged[-1]) if tagged else None


def without_commands(text: str, commands: re.Pattern[str]) -> str:
    """Returns a text without LaTeX commands, whose argument is group 1 of `commands`, and with single spaces."""
    return _SPACE.sub(" ", commands.sub(r" \1", text)).strip()


def _content(text: str, start: int) -> str:
    """Returns the text between the brace that ends before `start` and its partner."""
    depth = 1
    for index, character in enumerate(text[start:], start):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[start:index]
    return ""
