"""A reward for the problems of reasoning-gym: the score that the library itself gives an answer."""

from __future__ import annotations

import inspect
import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from lightrl.imports import import_extra
from lightrl.records import Sample
from lightrl.rewards.scoring import Isolation

# Several tasks run answers as Python, by eval() or by parse_expr() of sympy, which uses it. An answer only computes if
# it has no attribute, loop, assignment or text, which sympy's functions run, and calls nothing but these functions.
_RUNS_ANSWERS = re.compile(r"\b(eval|parse_expr|sympify)\(")
_FUNCTIONS = "sqrt|exp|log|ln|sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|[Aa]bs|factorial"
_DOES_MORE = re.compile(
    r"[#\\'\"]|:=|__|\b(?:for|lambda)\b|\.\s*[^\W\d]|[)\]}]\s*\("
    rf"|(?<![^\W\d])(?!(?:{_FUNCTIONS})\s*\()[^\W\d]\w*\s*\("
)


class ReasoningGym:
    """The score of the response by the task's own rule, from 0 to 1; some tasks give part of it for a close answer."""

    # It runs in a process of its own: what a policy writes can keep sympy, or Python itself, busy without end.
    isolation = Isolation(timeout_s=30.0, no_verdict_if_stopped=True)

    def __init__(self, *, answer_tag: str = "") -> None:
        """Sets the tag: the answer is in the last <TAG>...</TAG> of the response; an empty tag: all of the response."""
        library = import_extra("reasoning_gym", extra="reasoning-gym", needed_by="The reward reasoning_gym")
        self._find_score: Any = library.get_score_answer_fn
        self._answer_tag = answer_tag
        self._scores: dict[str, Any] = {}  # by task
        self._tagged = re.compile(rf"<{answer_tag}>(.*?)</{answer_tag}>", re.DOTALL) if answer_tag else None

    def __reduce__(self) -> Any:
        return partial(ReasoningGym, answer_tag=self._answer_tag), ()

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
        if answer and not _is_safe(answer, scores):
            return 0.0
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


def _is_safe(answer: str, scores: Callable[..., float]) -> bool:
    """Returns whether the task runs nothing of an answer but a computation."""
    if not _DOES_MORE.search(answer):
        return True
    evaluators = _evaluators_of(scores)
    return not evaluators or (evaluators == {"eval"} and _is_literal(answer))  # sympy would run the text in a literal


def _is_literal(answer: str) -> bool:
    try:
        literal_eval(answer)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


@lru_cache(maxsize=1024)
def _evaluators_of(scores: Callable[..., float]) -> set[str]:
    return set(_RUNS_ANSWERS.findall(inspect.getsource(scores)))
