"""The score that reasoning-gym gives an answer to one of its problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lightrl.imports import import_extra
from lightrl.records import Sample


class ReasoningGym:
    """The task's own score, from 0 to 1, of the response; some tasks give a part of it for an answer that is close."""

    def __init__(self, *, answer_tag: str = "") -> None:
        """answer_tag: the answer is what stands in the last <TAG>...</TAG> of the response; empty: all of it."""
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

    @staticmethod
    def _score(scores: Callable[..., float], answer: str | None, entry: Mapping[str, Any]) -> float:
        """Returns 0 for an answer that the task cannot read: several raise, instead of scoring it."""
        try:
            return float(scores(answer, entry))
        except Exception:
            scores(entry["answer"], entry)  # a task that cannot read its own answer is at fault: that raises
            return 0.0

    def _answer(self, text: str) -> str | None:
        if self._tagged is None:
            return text.strip()
        found = self._tagged.findall(text)
        return found[-1].strip() if found else None
