"""1 for a response that has the wanted form, whatever it says."""

from __future__ import annotations

import re

from lightrl.records import Sample

THINK_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


class ResponseFormat:
    """Whether the whole response, without the white space around it, matches a regular expression.

    The dot matches line breaks too. Left out: one block of <think>, then one of <answer>, and nothing else.
    """

    def __init__(self, *, pattern: str = THINK_ANSWER) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"format.pattern {pattern!r} is no regular expression: {error}.") from error

    def __call__(self, sample: Sample, /) -> float:
        return float(self._pattern.fullmatch(sample.text.strip()) is not None)
