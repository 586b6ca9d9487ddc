"""A reward for the form of a response, whatever its content."""

from __future__ import annotations

import re

from lightrl.records import Sample

THINK_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


_OPENING = "<think>"


class ResponseFormat:
    """1 if the whole response, without surrounding white space, matches a regular expression.

    The dot also matches line breaks. The default pattern is a <think> block, then an <answer> block, and nothing else.
    A <think> with which the prompt ends counts as the response's own, since many chat templates write it there.
    """

    def __init__(self, *, pattern: str = THINK_ANSWER) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"format.pattern {pattern!r} is no regular expression: {error}.") from error

    def __call__(self, sample: Sample, /) -> float:
        text = sample.text.strip()
        is_opened = sample.prompt.text.rstrip().endswith(_OPENING)
        written = [text, _OPENING + text] if is_opened else [text]
        return float(any(map(self._pattern.fullmatch, written)))
