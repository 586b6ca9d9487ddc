"""The final answers of responses, which a reward reads, for the vote of an evaluation (--eval.majority).

A reward reads answers if it has answer_of(sample), as a method or an attribute. Equal answers must be equal values. An
isolated reward reads them in processes of its own, too, which takes numbers and texts. An error stops the evaluation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from lightrl.config import LateMistakeError
from lightrl.records import Sample
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import NoVerdictError, kind_of, unwrapped
from lightrl.rewards.time_limit import call_in_time
from lightrl.rewards.worker_pool import WorkerPool

ReadAnswers = Callable[[Sequence[Sample]], list[Hashable | None]]


def reader_of(rewards: RewardSet) -> ReadAnswers:
    """Returns a function that reads answers with the first reward that can; raises LateMistakeError if none can."""
    for item in rewards.rewards:
        read = getattr(unwrapped(item.reward), "answer_of", None)
        if read is not None:
            return _reader(item.reward, read, rewards.limits.timeout_s, rewards.limits.num_workers)
    labels = ", ".join(item.label for item in rewards.rewards)
    raise LateMistakeError(
        f"--eval.majority needs a reward that reads the answer of a response, and {labels} has no answer_of(sample): "
        "use exact_match, last_number, math or reasoning_gym, or give it one (docs/adding_a_reward.md)."
    )


def _reader(reward: Any, read: Callable[[Sample], Hashable | None], timeout_s: float, num_workers: int) -> ReadAnswers:
    isolation = kind_of(reward).isolation

    def read_here(samples: Sequence[Sample]) -> list[Hashable | None]:
        return [_or_none(partial(call_in_time, timeout_s, read, sample)) for sample in samples]

    def read_apart(samples: Sequence[Sample]) -> list[Hashable | None]:
        assert isolation is not None
        pool = WorkerPool(reward, isolation, num_workers=num_workers, timeout_s=timeout_s, call=read)
        try:
            return [_or_none(partial(_result, found)) for found in pool.run(samples)]
        finally:
            pool.close()

    return read_here if isolation is None else read_apart


def _or_none(find: Callable[[], Hashable | None]) -> Hashable | None:
    """Returns the answer; None if the reward could not judge the response either. Raises TypeError for no value."""
    try:
        answer = find()
    except NoVerdictError:
        return None
    if inspect.isawaitable(answer) or not _is_hashable(answer):
        raise TypeError(
            f"answer_of(sample) returned {answer!r}: it must be no coroutine, and return a value that can be hashed, "
            "such as a text, a number or a tuple, or None."
        )
    return answer


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _result(found: Any) -> Hashable | None:
    if isinstance(found, Exception):
        raise found
    answer: Hashable | None = found
    return answer
