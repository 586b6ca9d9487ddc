from __future__ import annotations

import asyncio
import functools
import math
import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from made_samples import made_sample
from reward_samples import answered, doing_as_told, even, even_elsewhere, run

from lightrl.records import Prompt, Sample
from lightrl.rewards import NoVerdictError, RewardError, batch_reward, group_reward, load_reward, score, time_limit
from lightrl.rewards.reward_set import make_runner
from lightrl.rewards.scoring import FailureBudget, ScoringLimits, kind_of


def sample(index: int, text: str) -> Sample:
    return made_sample(prompt=Prompt(index=index, text="", token_ids=(1,), answer="42"), sample_index=2, text=text)


def test_each_sample_gets_its_number_in_order() -> None:
    rewards = score(load_reward("exact_match"), [sample(0, "42"), sample(1, "41"), sample(2, " 42")])
    assert rewards == [1.0, 0.0, 1.0]
    assert score(load_reward("exact_match"), []) == []


def test_no_timer_is_set_for_a_reward_that_cannot_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def instant(sample: Sample) -> float:
        return float(sample.text == "42")

    def careful(sample: Sample) -> float:
        return instant(sample)

    instant.needs_time_limit = False  # type: ignore[attr-defined]
    timers: list[float] = []
    monkeypatch.setattr(time_limit.signal, "setitimer", lambda _, seconds, *rest: timers.append(seconds) or (0.0, 0.0))
    for reward, wanted in ((load_reward("exact_match"), []), (instant, []), (careful, [5.0, 0])):
        runner = make_runner(reward, ScoringLimits(timeout_s=5.0))
        assert runner.run([sample(0, "42")], FailureBudget()) == [1.0]
        assert timers == wanted


@pytest.mark.parametrize(
    ("value", "expected"), [(True, 1.0), (-3, -3.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.True_, 1.0)]
)
def test_any_real_number_becomes_a_float(value: Any, expected: float) -> None:
    (reward,) = score(lambda sample: value, [sample(0, "")])
    assert reward == expected
    assert type(reward) is float


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, r"nan \(float\)"),
        (-math.inf, r"-inf \(float\)"),
        (1e308, r"1e\+308 \(float\)"),
        (10**400, r"1000.* \(int\)"),
        (None, "None"),
        ("1.0", r"'1.0' \(str\)"),
        ([1.0], r"\[1.0\] \(list\)"),
    ],
)
def test_what_is_not_a_finite_number_is_named(value: Any, shown: str) -> None:
    def strange(sample: Sample) -> float:
        return value  # type: ignore[no-any-return]

    with pytest.raises(RewardError, match=f"'strange' returned {shown} on prompt 7 '.*', sample 2, response 'hello'"):
        score(strange, [sample(7, "hello")])


def test_an_object_that_cannot_be_called_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match="'object' is an object that cannot be called: give its class a __call__"):
        kind_of(object())  # type: ignore[arg-type]


class Scaled:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, sample: Sample) -> float:
        return self.scale


def test_a_class_in_place_of_its_object_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"'Scaled' is a class: give an object of it, reward=Scaled\(\.\.\.\)"):
        kind_of(Scaled)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'Scaled' is a class"):
        kind_of(functools.partial(Scaled, 2.0))  # type: ignore[arg-type]
    assert score(Scaled(0.5), [sample(7, "hello")]) == [0.5]


def test_a_reward_that_raises_is_named_with_its_cause() -> None:
    def parse(sample: Sample) -> float:
        return float(sample.text)

    with pytest.raises(RewardError, match="'parse' raised ValueError: could not .* on prompt 8 .* 'four'") as info:
        score(parse, [sample(7, "4"), sample(8, "four")])
    assert isinstance(info.value.__cause__, ValueError)
    assert info.value.__cause__.__traceback__ is not None
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (
            lambda sample: sample.response,
            r"no attribute 'response' on .* A reward reads sample.text, sample.prompt.answer",
        ),
        (lambda sample: sample["target"], "not subscriptable on .* A reward reads sample.text"),
        (lambda sample: sample.prompt.target, "no attribute 'target' on .* in sample.prompt.fields"),
        (lambda sample: sample.prompt.fields["level"], r"KeyError: 'level' on .* in sample.prompt.fields: 'target'\.$"),
        (lambda sample: sample.text.nothing, r"no attribute 'nothing' on .* response '4'\.$"),
    ],
)
def test_a_reward_that_looks_elsewhere_is_told_where(reward: Any, told: str) -> None:
    asked = sample(7, "4")
    object.__setattr__(asked.prompt, "fields", {"target": 5})
    with pytest.raises(RewardError, match=told):
        score(reward, [asked])


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


def test_a_reward_that_calls_exit_has_failed() -> None:
    def leaving(sample: Sample) -> float:
        exec("exit(0)")  # as the code of a response may
        return 1.0

    async def leaving_later(sample: Sample) -> float:
        await asyncio.sleep(0)
        return leaving(sample)

    async def leaving_in_a_task(sample: Sample) -> float:
        return sum(await asyncio.gather(leaving_later(sample)))

    @batch_reward
    def leaving_together(samples: Sequence[Sample]) -> list[float]:
        return [leaving(item) for item in samples]

    for reward, told in (
        (leaving, "SystemExit: 0"),
        (leaving_together, "SystemExit: 0"),
        (leaving_later, r"exit\(0\)"),
        (leaving_in_a_task, r"exit\(0\)"),
    ):
        with pytest.raises(RewardError, match=f"The reward 'mine' raised .*{told} on prompt 10"):
            run(reward, [answered("a")])


# ---- Limits ----------------------------------------------------------------------------------------------------------


def test_a_hanging_reward_fails_its_own_sample() -> None:
    def slow(sample: Sample) -> float:
        time.sleep(60 if sample.text == "hang" else 0)
        return 1.0

    async def slow_async(sample: Sample) -> float:
        await asyncio.sleep(60 if sample.text == "hang" else 0)
        return 1.0

    for reward in (slow, slow_async):
        started = time.monotonic()
        outcomes, _ = run(reward, [answered("a"), answered("hang"), answered("b")], max_failures=1, timeout_s=0.3)
        assert [outcomes[0], outcomes[2]] == [1.0, 1.0]
        assert "raised TimeLimitError: no result after 0.3 s on prompt 10" in str(outcomes[1])
        with pytest.raises(RewardError, match="no result after 0.3 s"):
            run(reward, [answered("hang")], timeout_s=0.3)
        assert time.monotonic() - started < 30


async def even_later(sample: Sample) -> float | None:
    return even(sample)


@group_reward
def even_of_groups(samples: Sequence[Sample]) -> list[float | None]:
    return [even(sample) for sample in samples]


@batch_reward
async def even_of_batches(samples: Sequence[Sample]) -> list[float | None]:
    return [even(sample) for sample in samples]


@pytest.mark.parametrize("reward", [even, even_later, even_of_groups, even_of_batches, even_elsewhere])
def test_none_is_no_failure_but_says_that_a_reward_does_not_apply(reward: Any) -> None:
    outcomes, budget = run(reward, [answered(text, position=place // 2) for place, text in enumerate("2345")])
    assert outcomes == [1.0, None, 1.0, None]
    assert budget.num_left_out == 2
    assert not budget.failures


def test_no_verdict_stops_nothing() -> None:
    def unsure(sample: Sample) -> float:
        raise NoVerdictError("who knows")

    outcomes, budget = run(unsure, [answered("a"), answered("b")])
    assert all(item.is_no_verdict for item in outcomes)
    assert len(budget.no_verdicts) == 2
    assert not budget.failures


def test_an_isolated_reward_runs_elsewhere_and_names_its_failures() -> None:
    outcomes, budget = run(doing_as_told, [answered("2"), answered("x")], max_failures=1)
    assert outcomes[0] == 2.0
    assert "The reward 'mine' raised WorkerError: ValueError" in str(outcomes[1])
    assert len(budget.failures) == 1


class TextlessError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


def test_what_has_no_text_is_named_with_its_reward() -> None:
    def returns(sample: Sample) -> Any:
        return TextlessError()

    def raises(sample: Sample) -> float:
        raise TextlessError

    with pytest.raises(
        RewardError, match=r"'returns' returned something whose repr\(\) raises KeyError \(TextlessError\)"
    ):
        score(returns, [answered("1")])
    with pytest.raises(RewardError, match=r"'raises' raised TextlessError: something whose str\(\) raises KeyError on"):
        score(raises, [answered("1")])
