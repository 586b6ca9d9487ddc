"""Two-digit addition, the task that a fresh installation trains on. A problem is a dictionary of strings; no torch."""

from __future__ import annotations

from functools import lru_cache

from lightrl.seeding import mix_seed

NUM_HELDOUT = 512
_SMALLEST, _LARGEST = 10, 99
_SPLIT_SEED, _ERROR_SEED = 7, 8
_LARGEST_ERROR = 20


def train_problems() -> list[dict[str, str]]:
    """Returns the 7,588 sums to train on, in a fixed random order."""
    return [_problem(left, right) for left, right in _split()[0]]


def heldout_problems() -> list[dict[str, str]]:
    """Returns the 512 sums that are never trained on, in neither order of their terms."""
    return [_problem(left, right) for left, right in _split()[1]]


def with_responses(problems: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the problems with the right answer as the response to imitate."""
    return [{"prompt": problem["prompt"], "response": problem["answer"]} for problem in problems]


def with_pairs(problems: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the problems with the right answer as chosen, and one that is off by 1 to 20 as rejected."""
    return [
        {"prompt": problem["prompt"], "chosen": problem["answer"], "rejected": _wrong_answer(problem)}
        for problem in problems
    ]


def _wrong_answer(problem: dict[str, str]) -> str:
    draw = mix_seed(_ERROR_SEED, *problem["prompt"].encode()) % (2 * _LARGEST_ERROR)
    error = draw - _LARGEST_ERROR if draw < _LARGEST_ERROR else draw - _LARGEST_ERROR + 1
    return str(int(problem["answer"]) + error)


def _problem(left: int, right: int) -> dict[str, str]:
    return {"prompt": f"{left}+{right}=", "answer": str(left + right)}


@lru_cache(maxsize=1)
def _split() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Splits all pairs of terms into (train, held out). 37+48 and 48+37 fall on the same side: no answer leaks."""
    terms = range(_SMALLEST, _LARGEST + 1)
    shuffled = sorted(
        ((left, right) for left in terms for right in terms), key=lambda pair: mix_seed(_SPLIT_SEED, *pair)
    )
    rising = [(left, right) for left, right in shuffled if left < right][: NUM_HELDOUT // 2]
    heldout = set(rising) | {(right, left) for left, right in rising}
    return [pair for pair in shuffled if pair not in heldout], [pair for pair in shuffled if pair in heldout]
