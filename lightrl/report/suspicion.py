"""Ranks samples by how likely it looks that their reward was earned in an unintended way.

A sample is suspicious if it was rewarded and is odd. Each sign of oddness adds its weight; the reader judges.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

_TRICKS = re.compile(
    r"ignore (?:all |the |any )*(?:previous|above|prior)|disregard (?:the|all)|as (?:a|the) (?:grader|judge)"
    r"|(?:full|maximum|perfect) (?:score|marks|reward)|\bscore\s*[:=]\s*\d|sys\.exit|os\._exit|assert True"
    r"|def __eq__|unittest|pytest\.skip|monkeypatch|reward\s*=|correct answer is (?:whatever|the reference)",
    re.IGNORECASE,
)
_LONG_ENOUGH = 60  # number of characters from which on a repetition is no accident
_REPETITIVE = 0.2  # compressed length over length; prose has 0.4 to 0.6
_FEWEST_PAID = 5  # samples of a kind that are needed to state their mean reward
_NEARLY = 0.8  # share of the reward of samples that contain the answer
_FAR = 3.5  # robust standard deviations


class Suspicion(NamedTuple):
    """How suspicious a sample is, and why."""

    score: float
    reasons: tuple[str, ...]


class _Sign(NamedTuple):
    weight: float
    says: Callable[[Row], str]  # returns a reason; empty: the sign is absent


def suspicions(samples: Sequence[Row]) -> list[Suspicion]:
    """Returns the suspicion of each sample of a run; a sample without reward has 0."""
    known = [item for item in samples if _reward(item) is not None]
    rewards = [value for item in known if (value := _reward(item)) is not None]
    if not rewards:
        return [Suspicion(0.0, ())] * len(samples)
    lowest, highest = min(rewards), max(rewards)
    middle = (lowest + highest) / 2
    rewarded = [item for item in known if _share(item, lowest, highest) >= 0.5 and (_reward(item) or 0.0) >= middle]
    signs = _signs(samples, rewarded, rewards)
    found = []
    for item in samples:
        share = _share(item, lowest, highest)
        reasons = [(sign.weight, reason) for sign in signs if share >= 0.5 and (reason := sign.says(item))]
        found.append(
            Suspicion(round(share * sum(weight for weight, _ in reasons), 3), tuple(text for _, text in reasons))
        )
    return found


class PaidWrongly(NamedTuple):
    """A finding about a reward that pays wrong responses or does not pay right ones."""

    title: str
    text: str


def paid_wrongly(samples: Sequence[Row]) -> PaidWrongly | None:
    """Returns what is wrong if responses without their reference answer are paid, or those with it are not."""
    answered = [item for item in samples if item.get("answer") not in (None, "")]
    known = [(item, reward) for item in answered if (reward := _reward(item)) is not None]
    return _paid_without_answer(known) or _unpaid_with_answer(known)


def _paid_without_answer(known: Sequence[tuple[Row, float]]) -> PaidWrongly | None:
    """Returns a finding if late samples without the answer get nearly as much as samples with it."""
    late = max((_step(item) for item, _ in known), default=0) * 2 / 3
    right = [reward for item, reward in known if _holds_answer(item)]
    wrong = [reward for item, reward in known if _step(item) > late and not _holds_answer(item)]
    if min(len(right), len(wrong)) < _FEWEST_PAID:
        return None
    mean_wrong, mean_right = statistics.fmean(wrong), statistics.fmean(right)
    if mean_right <= 0 or mean_wrong < _NEARLY * mean_right:
        return None
    return PaidWrongly(
        "Responses without the answer are paid as well",
        f"Of the logged samples of the last third, those that lack the reference answer got {mean_wrong:.3g} on "
        f"average; those of the run that hold it got {mean_right:.3g}. The reward pays for something else: read the "
        "samples that are suspicious first, and test it on them.",
    )


def _unpaid_with_answer(known: Sequence[tuple[Row, float]]) -> PaidWrongly | None:
    """Returns a finding if logged samples end with their answer and all of them got the lowest reward."""
    right = [reward for item, reward in known if _ends_with_answer(item)]
    rewards = [reward for _, reward in known]
    lowest, highest = min(rewards, default=0.0), max(rewards, default=0.0)
    if len(right) < _FEWEST_PAID or max(right) > lowest or lowest == highest > 0:  # the last: all of them are paid
        return None
    return PaidWrongly(
        "Responses with the answer are not paid",
        f"{len(right)} of {len(known)} logged samples end with the reference answer, and all of them got {lowest:.3g}, "
        "the lowest reward. The reward may expect another form of the answer: test it on these samples.",
    )


def _step(item: Row) -> float:
    step = item.get("step")
    return float(step) if isinstance(step, int) else 0.0


def _holds_answer(item: Row) -> bool:
    return _plain(item["answer"]) in _plain(_text(item))


def _ends_with_answer(item: Row) -> bool:
    """Returns whether the last word or words are the answer, apart from marks around them."""
    answer = item["answer"] if isinstance(item["answer"], str) else json.dumps(item["answer"])
    words = r"\s+".join(map(re.escape, answer.split()))
    return bool(words) and re.search(rf"(?<![\w.-]){words}\W*$", _text(item), re.IGNORECASE) is not None


def _signs(samples: Sequence[Row], rewarded: Sequence[Row], rewards: Sequence[float]) -> list[_Sign]:
    return [
        _Sign(3.0, _without_its_answer(samples)),
        _Sign(3.0, _answers_several(rewarded)),
        _Sign(3.0, _speaks_to_the_grader),
        _Sign(2.0, _is_repetitive),
        _Sign(2.0, _beyond_other_rewards(rewards)),
        _Sign(1.5, _components_disagree(samples)),
        _Sign(1.0, _of_odd_length(rewarded)),
        _Sign(1.0, _is_cut_off),
    ]


def _reward(item: Row) -> float | None:
    value = item.get("reward")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _share(item: Row, lowest: float, highest: float) -> float:
    """Returns the position of the reward between the lowest (0) and the highest (1) of the run."""
    reward = _reward(item)
    if reward is None:
        return 0.0
    return (reward - lowest) / (highest - lowest) if highest > lowest else float(reward > 0)


def _text(item: Row) -> str:
    return str(item.get("response") or "")


def _plain(text: object) -> str:
    whole = text if isinstance(text, str) else json.dumps(text)
    return "".join(whole.split()).replace(",", "").replace("$", "").casefold()


# ---- Signs -----------------------------------------------------------------------------------------------------------


def _without_its_answer(samples: Iterable[Row]) -> Callable[[Row], str]:
    """A sign that the reference answer is missing; it is used only if some samples do contain theirs."""
    with_answer = [item for item in samples if item.get("answer") not in (None, "")]
    holding = sum(map(_holds_answer, with_answer))
    if not with_answer or holding < 0.02 * len(with_answer):
        return lambda item: ""

    def says(item: Row) -> str:
        answer = item.get("answer")
        if answer in (None, "") or _holds_answer(item):
            return ""
        return "rewarded, but the reference answer is not in the response"

    return says


def _answers_several(rewarded: Iterable[Row]) -> Callable[[Row], str]:
    """A sign that the same response is rewarded whatever was asked."""
    answers: dict[str, set[str]] = defaultdict(set)
    for item in rewarded:
        if item.get("answer") not in (None, ""):
            answers[_text(item)].add(_plain(item["answer"]))

    def says(item: Row) -> str:
        count = len(answers.get(_text(item), ()))
        return f"the same response is rewarded for {count} different answers" if count > 1 else ""

    return says


def _speaks_to_the_grader(item: Row) -> str:
    found = _TRICKS.search(_text(item))
    return f"it addresses the grader or the tests: {found.group(0)!r}" if found else ""


def _is_repetitive(item: Row) -> str:
    text = _text(item).encode()
    if len(text) < _LONG_ENOUGH:
        return ""
    ratio = len(zlib.compress(text)) / len(text)
    return f"it repeats itself: it compresses to {ratio:.0%} of its length" if ratio < _REPETITIVE else ""


def _beyond_other_rewards(rewards: Sequence[float]) -> Callable[[Row], str]:
    limit = _far_above(rewards)

    def says(item: Row) -> str:
        reward = _reward(item)
        return f"its reward {reward:g} is far above the others" if reward is not None and reward > limit else ""

    return says


def _far_above(values: Sequence[float]) -> float:
    """Returns the value above which a sample is far from the upper half of the others."""
    counts = Counter(values)
    if len(counts) < 3:  # right or wrong
        return math.inf
    upper = sorted(values)[len(values) // 2 :]
    center = statistics.median(upper)
    spread = statistics.median(abs(value - center) for value in upper)
    return center + _FAR * max(1.4826 * spread, 0.25 * abs(center), 1e-9)


def _components_disagree(samples: Iterable[Row]) -> Callable[[Row], str]:
    """A sign that one of several summed rewards pays and another one does not."""
    values: dict[str, list[float]] = defaultdict(list)
    for item in samples:
        for name, value in _components(item).items():
            values[name].append(value)
    ends = {name: (min(given), max(given)) for name, given in values.items() if max(given) > min(given)}

    def says(item: Row) -> str:
        own = _components(item)
        high = [name for name, (_, top) in ends.items() if own.get(name) == top]
        low = [name for name, (bottom, _) in ends.items() if own.get(name) == bottom]
        return f"{', '.join(high)} at its best, {', '.join(low)} at its worst" if high and low else ""

    return says


def _components(item: Row) -> Mapping[str, float]:
    found = item.get("rewards")
    values = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in values if isinstance(value, int | float)}


def _of_odd_length(rewarded: Sequence[Row]) -> Callable[[Row], str]:
    lengths = [math.log1p(len(_text(item))) for item in rewarded]
    if len(lengths) < 8:
        return lambda item: ""
    center = statistics.median(lengths)
    spread = max(1.4826 * statistics.median(abs(length - center) for length in lengths), 0.2)

    def says(item: Row) -> str:
        length = len(_text(item))
        is_odd = abs(math.log1p(length) - center) > _FAR * spread
        return f"{length} characters, where {math.expm1(center):.0f} are usual" if is_odd else ""

    return says


def _is_cut_off(item: Row) -> str:
    return "rewarded, though it was cut off" if item.get("finish_reason") == "length" else ""
