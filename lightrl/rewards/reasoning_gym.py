"""A reward for the problems of reasoning-gym: the score that the library itself gives an answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lightrl.imports import import_extra
from lightrl.records import Sample


class ReasoningGym:
    """The score of the response by the task's own rule, from 0 to 1; some tasks give part of it for a close answer."""

    def __init__(self, *, answer_tag: str = "") -> None:
        """Sets the tag: the answer is in the last <TAG>...</TAG> of the response; an empty tag: all of the response."""
        library = import_extra("reasoning_gym", extra="reasoning-gym", needed_by="The reward reasoning_gym")
        self._find_score: Any = library.get_score_answer_fn
        self._scores: dict[str, Any] = {}  # by task
        self._tagged = re.compile(rf"<{answer_tag}>(.*?)</{answer_tag}>", re.DOTALL) if answer_tag else None

    def __call__(self, sample: Sample, /) -> float:
        fields = sample.prompt.fields
        if "entry" not in fields or "task" not in fields:
            raise ValueError(
                "the prompt is no problem of reasoning-gym: take the data from it by --train_data reasoning_gym:TASK"
            )
        task = fields["task"]
        if task not in self._scores:
            self._scores[task] = self._find_score(task)
        return self._score(self._scores[task], self._answer(sample.text), fields["entry"])

    def answer_of(self, sample: Sample) -> str | None:
        """Returns the text of the answer, for --eval.majority."""
        return self._answer(sample.text) or None

    @staticmethod
    def _score(scores: Callable[..., float], answer: str | None, entry: Mapping[str, Any]) -> float:
        """Scores an answer; one that the task cannot read gets 0, because several tasks raise an error for it."""
        try:
            return float(scores(answer, entry))
        except Exception:
            scores(entry["answer"], entry)  # raises if the task cannot read its own answer: then the task is at fault
            return 0.0

    def _answer(self, text: str) -> str | None:
        if self._tagged is None:
            return text.strip()
        found = self._tagged.findall(text)
        return found[-1].strip() if found else None
