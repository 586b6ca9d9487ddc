from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lightrl.records import Prompt, Sample
from lightrl.rewards import RewardError, batch_reward, load_reward, score


def sample(index: int, text: str) -> Sample:
    return Sample(
        prompt=Prompt(index=index, text="", token_ids=(1,), answer="42"),
        position=0,
        sample_index=2,
        response_ids=(),
        sampler_logprobs=(),
        versions=(),
        finish_reason="stop",
        text=text,
    )


def test_each_sample_gets_its_number_in_order() -> None:
    rewards = score(load_reward("exact_match"), [sample(0, "42"), sample(1, "41"), sample(2, " 42")])
    assert rewards == [1.0, 0.0, 1.0]
    assert score(load_reward("exact_match"), []) == []


@pytest.mark.parametrize(("value", "expected"), [(True, 1.0), (-3, -3.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0)])
def test_any_real_number_becomes_a_float(value: Any, expected: float) -> None:
    (reward,) = score(lambda sample: value, [sample(0, "")])
    assert reward == expected
    assert type(reward) is float


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, r"nan \(float\)"),
        (-math.inf, r"-inf \(float\)"),
        (None, r"None \(NoneType\)"),
        ("1.0", r"'1.0' \(str\)"),
        ([1.0], r"\[1.0\] \(list\)"),
    ],
)
def test_what_is_not_a_finite_number_is_named(value: Any, shown: str) -> None:
    def strange(sample: Sample) -> float:
        return value  # type: ignore[no-any-return]

    with pytest.raises(RewardError, match=f"'strange' returned {shown} on prompt 7, sample 2, response 'hello'"):
        score(strange, [sample(7, "hello")])


def test_a_reward_that_raises_is_named_with_its_cause() -> None:
    def parse(sample: Sample) -> float:
        return float(sample.text)

    with pytest.raises(RewardError, match="'parse' raised ValueError: could not .* on prompt 8, .* 'four'") as info:
        score(parse, [sample(7, "4"), sample(8, "four")])
    assert isinstance(info.value.__cause__, ValueError)
    assert info.value.__cause__.__traceback__ is not None
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


def test_a_long_response_is_shortened_in_the_error() -> None:
    def failing(sample: Sample) -> float:
        raise KeyError("x" * 10_000)

    with pytest.raises(RewardError, match=r"\(5000 characters\)") as info:
        score(failing, [sample(0, "a" * 5000)])
    assert len(str(info.value)) < 700


def test_a_missing_answer_is_an_error_and_not_a_zero() -> None:
    unanswered = sample(3, "42")
    object.__setattr__(unanswered.prompt, "answer", None)
    with pytest.raises(RewardError, match="'exact_match' raised ValueError: the prompt has no answer .* on prompt 3"):
        score(load_reward("exact_match"), [unanswered])


def test_a_batch_reward_sees_all_samples_at_once() -> None:
    calls = []

    @batch_reward
    def lengths(samples: Sequence[Sample]) -> list[float]:
        calls.append(len(samples))
        return [len(sample.text) for sample in samples]

    assert score(lengths, [sample(0, "a"), sample(1, "abc")]) == [1.0, 3.0]
    assert calls == [2]
    assert score(lengths, []) == []
    assert calls == [2]


def test_a_batch_reward_that_fails_is_named() -> None:
    @batch_reward
    def short(samples: Sequence[Sample]) -> list[float]:
        return [1.0]

    @batch_reward
    def holed(samples: Sequence[Sample]) -> list[float]:
        return [1.0, math.nan]

    @batch_reward
    def failing(samples: Sequence[Sample]) -> list[float]:
        raise OSError("no connection.")

    samples = [sample(5, "a"), sample(6, "b")]
    with pytest.raises(RewardError, match="'short' returned 1 numbers for 2 samples"):
        score(short, samples)
    with pytest.raises(RewardError, match=r"'holed' returned nan \(float\) on prompt 6"):
        score(holed, samples)
    with pytest.raises(RewardError, match="'failing' raised OSError: no connection on 2 samples, first prompt 5"):
        score(failing, samples)


def test_an_object_can_be_a_reward() -> None:
    class Constant:
        def __call__(self, sample: Sample, /) -> float:
            return math.nan if sample.text else 1.0

    assert score(Constant(), [sample(0, "")]) == [1.0]
    with pytest.raises(RewardError, match="The reward 'Constant' returned nan"):
        score(Constant(), [sample(0, "x")])
