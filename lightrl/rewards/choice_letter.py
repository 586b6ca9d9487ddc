"""Finds the letter of a multiple-choice answer, which math-verify reads in LaTeX only."""

from __future__ import annotations

import re

from lightrl.rewards.answer_part import answer_part, behind_thoughts

_DRESS = re.compile(
    r"\\(?:text(?:bf|rm|it|sf)?|math(?:bf|rm|it|sf)|bf|rm) *\{?|\\[()\[\]]|[{}$*`]|\\[ ,;:!]|~"
)  # of a letter
_LETTER = re.compile(r"\(([A-J])\)|\[([A-J])\]|([A-J])")
_LABEL = re.compile(r"(?:\(([A-J])\)|([A-J])[).:])(?:\s|$)")  # before the text of an option
# The letter ends a clause: behind it may stand no word, as in `the answer is A triangle`, and no other letter.
_STATED = re.compile(
    r"\b(?:answer(?: is:?| must be| would be|:)|(?:correct|right|best) (?:option|choice)(?: is:?|:))\s*"
    r"(?:(?:option|choice) )?"
    r"(?:\(([A-J])\)|([A-J])\b(?![-'\u2019(]))(?! *[?/&]| *, *\(?[A-J]\b| (?:or|and|nor)\b)(\s+[a-z]+)?",
    re.IGNORECASE,
)
_DOUBTED = re.compile(r"(?:\b(?:if|whether|suppose|assume|assuming|unless|not|why|when)|n't)\b[^.\n]*$", re.IGNORECASE)
_LONE = re.compile(r"\(([A-J])\)|(?<![\w'(.-])([B-HJ])(?![\w'\u2019(-])")  # not A and I, which are words
_REASONS = ("because", "since", "as", "by", "from")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def choice_of(answer: str) -> str:
    r"""Returns the letter that the prompt's answer is, such as C for \textbf{(C)}; empty if it is something else."""
    letter = _LETTER.fullmatch(_undressed(answer).rstrip("."))
    return _found(letter)


def stated_choice(text: str) -> str:
    r"""Returns the letter that a response settles on: boxed, tagged, in `the answer is C`, or alone; empty if none.

    A letter in a box or in tags may have its option's text behind it: \boxed{\textbf{(C)}\ 18}. A response that names
    another letter after its answer settles on none.
    """
    part = behind_thoughts(text)
    content = answer_part(part)
    return _in_words(_undressed(part)) if content is None else _labelled(content)


def _labelled(content: str) -> str:
    plain = _undressed(content)
    return _found(_LETTER.fullmatch(plain.rstrip("."))) or _found(_LABEL.match(plain))


def _in_words(plain: str) -> str:
    letter, end = "", 0
    if "\n" not in plain and not _WORD.search(plain):  # `C. 18`, and not `(C) is wrong`
        letter, end = _labelled(plain), 3
    for found in () if letter else _STATED.finditer(plain):
        following = (found[3] or "").strip().lower()
        is_firm = not following or following in _REASONS
        if (
            is_firm
            and _found(found).isupper()
            and not _DOUBTED.search(plain, max(found.start() - 200, 0), found.start())
        ):
            letter, end = _found(found), found.end()
    others = {_found(other) for other in _LONE.finditer(plain, end)} if letter else set()
    return letter if others <= {letter} else ""


def _found(match: re.Match[str] | None) -> str:
    """Returns the letter in one of the first three groups of a match."""
    groups = match.groups()[: _LETTER.groups] if match else ()
    return next((group for group in groups if group and len(group.strip()) == 1), "")


def _undressed(text: str) -> str:
    return re.sub(r"[ \t]+", " ", _DRESS.sub(lambda mark: " " if mark[0][-1] in " ~,;:!" else "", text)).strip()
