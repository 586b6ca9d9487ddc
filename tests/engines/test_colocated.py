"""The state machine around an engine, over a scripted one that keeps a record of what it was asked."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightrl.engines.base import (
    AnyPrompt,
    Completion,
    EnginePart,
    EnginePrompt,
    InferenceEngine,
    SamplingParams,
    as_prompt,
    check_engine_name,
    create_engine,
)
from lightrl.engines.colocated import ColocatedEngine, EngineStatus, _Request
from lightrl.own_calls import called_own_code


class RecordingEngine(InferenceEngine):
    max_model_len = 8
    vocab_size = 10

    def __init__(self) -> None:
        self.waiting: list[tuple[int, tuple[int, ...]]] = []
        self.calls: list[str] = []
        self.fails = False

    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        self.waiting.append((len(self.calls), as_prompt(prompt).token_ids))
        self.calls.append("submit")
        return self.waiting[-1][0]

    def step(self) -> list[Completion]:
        if self.fails:
            raise RuntimeError("out of memory")
        done = [
            Completion(
                request_id=request_id,
                sample_index=0,
                prompt_token_ids=prompt,
                output_token_ids=(1,),
                logprobs=(-1.0,),
                versions=(0,),
                finish_reason="stop",
            )
            for request_id, prompt in reversed(self.waiting)
        ]
        self.waiting = []
        return done

    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        self.calls.append("abort")
        self.waiting = []
        return []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        for name, _ in weights:
            if name == "unknown":
                raise ValueError("unknown weight 'unknown'")

    def sleep(self, level: int = 1) -> int:
        self.calls.append(f"sleep {level}")
        return 100

    def wake(self, part: EnginePart) -> None:
        self.calls.append(f"wake {part}")

    def close(self) -> None:
        self.calls.append("close")


TWO = SamplingParams(max_new_tokens=2)


@pytest.fixture
def ready() -> ColocatedEngine:
    engine = ColocatedEngine(RecordingEngine())
    engine.update_weights([("w", torch.zeros(3))], version=4)
    return engine


def calls(engine: ColocatedEngine) -> list[str]:
    assert isinstance(engine.engine, RecordingEngine)
    return engine.engine.calls


def test_transitions_are_idempotent_and_report_what_was_freed(ready: ColocatedEngine) -> None:
    assert ready.status is EngineStatus.WAKEUP
    assert (ready.sleep(), ready.sleep()) == (100, 0)
    assert ready.status is EngineStatus.SLEEPED
    with pytest.raises(RuntimeError, match="The engine is asleep"):
        ready.generate([[1]], [TWO])
    ready.wake()
    ready.wake()
    assert calls(ready) == ["sleep 1", "wake weights", "wake kv_cache"]
    assert len(ready.generate([[1]], [TWO])) == 1


def test_completions_come_in_the_order_of_the_prompts(ready: ColocatedEngine) -> None:
    found = ready.generate([[1], [2] * 6, [3]], [TWO] * 3)  # the second fills the context
    assert [item.prompt_token_ids for item in found] == [(1,), (2,) * 6, (3,)]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "prompt 1 is empty"),
        ([3, 10], "prompt 1 holds token id 10, outside the model's vocabulary of 10"),
        ([-1], "prompt 1 holds token id -1"),
        ([1] * 7, "prompt 1 has 7 tokens; with max_new_tokens 2 that is beyond the context of 8"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_is_submitted(
    ready: ColocatedEngine, prompt: list[int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        ready.generate([[1], prompt], [SamplingParams(max_new_tokens=2)] * 2)
    assert calls(ready) == []


@pytest.mark.parametrize("token", [-1, 10])
def test_a_stop_token_that_the_model_does_not_have_is_refused(ready: ColocatedEngine, token: int) -> None:
    """vLLM would refuse it when nothing catches the error, and a minimum of tokens would bar some other token."""
    params = replace(TWO, stop_token_ids=(1, token))
    with pytest.raises(ValueError, match=f"stop_token_ids of prompt 0 holds token id {token}, outside the model's"):
        ready.generate([[1]], [params])
    assert calls(ready) == []


def test_no_weights_no_generation() -> None:
    engine = ColocatedEngine(RecordingEngine())
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.generate([[1]], [TWO])


def test_a_sync_reports_its_bytes_and_a_broken_one_leaves_no_usable_version(ready: ColocatedEngine) -> None:
    report = ready.update_weights([("a", torch.zeros(2, 3)), ("b", torch.zeros(1, dtype=torch.bfloat16))], version=5)
    assert (report.version, report.num_bytes, ready.version) == (5, 2 * 3 * 4 + 2, 5)
    with pytest.raises(ValueError, match="unknown weight"):
        ready.update_weights([("unknown", torch.zeros(1))], version=6)
    with pytest.raises(RuntimeError, match="no weights yet"):
        ready.generate([[1]], [TWO])


class RunsOnItsOwn(RecordingEngine):
    """Stops the first request half way; the others had ended by then."""

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        partial, *ended = sorted(self.step(), key=lambda item: item.request_id)
        return [replace(partial, finish_reason="abort"), *ended]


def test_samples_that_ended_before_they_were_set_aside_are_not_sampled_on() -> None:
    engine = ColocatedEngine(RunsOnItsOwn())
    engine.update_weights([("w", torch.zeros(3))], version=4)
    first, second = engine.submit([1], TWO), engine.submit([2], TWO)
    engine.update_weights([("w", torch.ones(3))], version=5)
    assert calls(engine) == ["submit"] * 3  # the first request once more
    assert engine.has_unfinished()
    ended, resumed = engine.step()
    assert (ended.request_id, ended.finish_reason, ended.output_token_ids) == (second, "stop", (1,))
    assert (resumed.request_id, resumed.output_token_ids) == (first, (1, 1))
    assert not engine.has_unfinished()


def test_abort_gives_samples_that_had_ended_too() -> None:
    engine = ColocatedEngine(RunsOnItsOwn())
    engine.update_weights([("w", torch.zeros(3))], version=4)
    engine.submit([1], TWO)
    second = engine.submit([2], TWO)
    engine.update_weights([("w", torch.ones(3))], version=5)
    assert second in [item.request_id for item in engine.abort()]
    assert not engine.has_unfinished()


class Halfway(RecordingEngine):
    """Stops every request after one token; sleeping may fail."""

    cannot_sleep = False

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        return [replace(item, finish_reason="abort") for item in sorted(self.step(), key=lambda item: item.request_id)]

    def sleep(self, level: int = 1) -> int:
        if self.cannot_sleep:
            raise RuntimeError("cannot sleep")
        return 100


@pytest.mark.parametrize(("num_done", "min_left"), [(0, 4), (3, 1), (5, 0)])
def test_the_rest_of_a_sample_counts_on_from_what_is_done(num_done: int, min_left: int) -> None:
    params = SamplingParams(max_new_tokens=9, min_new_tokens=4, n=3, seed=8, first_token=2)
    partial = replace(
        SAMPLE,
        sample_index=2,
        output_token_ids=(1,) * num_done,
        logprobs=(-1.0,) * num_done,
        versions=(0,) * num_done,
    )
    prompt, rest = _Request(0, EnginePrompt(token_ids=(5, 6)), params).rest(partial)
    assert prompt.token_ids == (5, 6, *(1,) * num_done)
    left = {"max_new_tokens": 9 - num_done, "min_new_tokens": min_left}
    assert rest == replace(params, n=1, first_sample=2, first_token=2 + num_done, **left)


def test_a_failed_sync_or_sleep_loses_no_sample() -> None:
    engine = ColocatedEngine(scripted := Halfway())
    engine.update_weights([("w", torch.zeros(3))], version=4)
    five = SamplingParams(max_new_tokens=5)
    first, second = engine.submit([1], five), engine.submit([2], five)
    with pytest.raises(ValueError, match="unknown weight"):
        engine.update_weights([("unknown", torch.ones(3))], version=5)
    assert engine.has_unfinished()
    engine.update_weights([("w", torch.ones(3))], version=5)
    scripted.cannot_sleep = True
    with pytest.raises(RuntimeError, match="cannot sleep"):
        engine.sleep()
    third = engine.submit([3], five)
    engine.update_weights([("w", torch.ones(3))], version=6)
    found = {item.request_id: item.output_token_ids for item in engine.step()}
    assert found == {first: (1, 1, 1), second: (1, 1, 1), third: (1, 1)}
    assert not engine.has_unfinished()


def test_samples_of_a_sleeping_engine_enter_it_when_it_is_awake() -> None:
    engine = ColocatedEngine(scripted := Halfway())
    engine.update_weights([("w", torch.zeros(3))], version=4)
    engine.submit([1], SamplingParams(max_new_tokens=5))
    engine.sleep()
    engine.update_weights([("w", torch.ones(3))], version=5)
    assert not scripted.waiting
    engine.wake()
    assert [prompt for _, prompt in scripted.waiting] == [(1, 1)]


def test_a_failed_step_keeps_the_samples_that_had_ended() -> None:
    engine = ColocatedEngine(scripted := RunsOnItsOwn())
    engine.update_weights([("w", torch.zeros(3))], version=4)
    first, second = engine.submit([1], TWO), engine.submit([2], TWO)
    engine.update_weights([("w", torch.ones(3))], version=5)
    scripted.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    scripted.fails = False
    assert [item.request_id for item in engine.step()] == [second, first]


def test_a_sample_with_penalties_stops_a_sync_before_it_touches_any_other() -> None:
    engine = ColocatedEngine(Halfway())
    engine.update_weights([("w", torch.zeros(3))], version=4)
    ids = [engine.submit([1], TWO), engine.submit([2], replace(TWO, presence_penalty=1.0))]
    with pytest.raises(RuntimeError, match="Samples with penalties cannot go on"):
        engine.update_weights([("w", torch.ones(3))], version=5)
    assert sorted(item.request_id for item in engine.step()) == ids


def test_a_failure_leaves_no_request_behind(ready: ColocatedEngine) -> None:
    engine = ready.engine
    assert isinstance(engine, RecordingEngine)
    engine.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        ready.generate([[1]], [TWO])
    engine.fails = False
    assert len(ready.generate([[2]], [TWO])) == 1
    ready.submit([1], TWO)
    with pytest.raises(RuntimeError, match="still has requests"):
        ready.generate([[2]], [TWO])
    assert len(ready.abort()) == 0  # the scripted engine gives nothing back
    penalty = replace(TWO, repetition_penalty=1.1)
    ready.submit([1], penalty)
    with pytest.raises(RuntimeError, match="Samples with penalties cannot go on after a sleep or a weight sync"):
        ready.sleep()
    ready.abort()
    assert ready.sleep() == 100


def test_an_engine_that_loses_samples_is_named(ready: ColocatedEngine) -> None:
    with pytest.raises(RuntimeError, match="RecordingEngine gave 1 completions for 2 samples"):
        ready.generate([[1]], [SamplingParams(max_new_tokens=2, n=2)])


SAMPLE = Completion(
    request_id=0,
    sample_index=0,
    prompt_token_ids=(1,),
    output_token_ids=(1, 2),
    logprobs=(-1.0, -1.0),
    versions=(0, 0),
    finish_reason="stop",
)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, r"RecordingEngine.step\(\) returned None: no list of Completion"),
        (["a text"], "RecordingEngine returned 'a text', which is no Completion of a running request"),
        (
            [replace(SAMPLE, logprobs=(-1.0,))],
            r"a Completion of request 0, sample 0 .* \(2 and 1 and 2 entries\). Each must be a tuple with one entry",
        ),
        ([replace(SAMPLE, logprobs=(-1.0, math.nan))], r"logprobs=\(-1.0, nan\).* finite log-prob"),
        ([replace(SAMPLE, logprobs=(-1.0, None))], r"logprobs=\(-1.0, None\).* finite log-prob"),
        ([replace(SAMPLE, logprobs=(-math.inf, -1.0))], r"logprobs=\(-inf, -1.0\).* finite log-prob"),
        ([replace(SAMPLE, logprobs=(-1.0, math.inf))], r"logprobs=\(-1.0, inf\).* finite log-prob"),
        (
            [replace(SAMPLE, finish_reason="eos")],
            r"sample 0 with the finish_reason 'eos'.* none of \('stop', 'length', 'abort'\)",
        ),
        (
            [replace(SAMPLE, finish_reason=None)],
            r"sample 0 with the finish_reason None.* none of \('stop', 'length', 'abort'\)",
        ),
        ([replace(SAMPLE, logprobs=None)], r"logprobs=None.* \(2 and no and 2 entries\)"),
        ([replace(SAMPLE, output_token_ids=None)], r"output_token_ids=None.* \(no and 2 and 2 entries\)"),
        ([replace(SAMPLE, output_token_ids=(1.0, 2.0))], r"output_token_ids=\(1.0, 2.0\).* ids from 0 to 9"),
        ([replace(SAMPLE, output_token_ids=torch.tensor([1, 2]))], r"output_token_ids=tensor\(.* must be a tuple"),
        (
            [replace(SAMPLE, request_id=7)],
            r"returned Completion\(request_id=7, .* no Completion of a running request \(those are \[0\]\)",
        ),
        ([SAMPLE, SAMPLE], r"(request_id=0, .* which is no Completion of a running|2 completions for 1 samples)"),
        ([replace(SAMPLE, output_token_ids=(0, 10))], r"output_token_ids=\(0, 10\).* ids from 0 to 9"),
        ([replace(SAMPLE, output_token_ids=(-1, 9))], r"output_token_ids=\(-1, 9\).* ids from 0 to 9"),
    ],
)
def test_what_an_engine_must_not_return_is_named(
    ready: ColocatedEngine, monkeypatch: pytest.MonkeyPatch, returned: Any, text: str
) -> None:
    monkeypatch.setattr(ready.engine, "step", lambda: returned)
    monkeypatch.setattr(ready.engine, "submit", lambda prompt, params: 0)
    monkeypatch.setattr(ready.engine, "has_unfinished", iter([False, True, False]).__next__)
    with pytest.raises(RuntimeError, match=text):
        ready.generate([[1]], [TWO])
    ready.submit([1], TWO)
    with pytest.raises(RuntimeError, match=text):
        ready.step()


def test_an_engine_that_says_too_early_that_it_has_finished_is_told_so(
    ready: ColocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready.engine, "has_unfinished", lambda: None)
    with pytest.raises(RuntimeError, match=r"0 completions for 1 samples. Its has_unfinished\(\) must return True"):
        ready.generate([[1]], [TWO])


def test_an_engine_may_return_a_token_at_each_end_of_the_vocabulary_or_none(
    ready: ColocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ids in ((0, 9), ()):
        sample = replace(SAMPLE, output_token_ids=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids))
        monkeypatch.setattr(ready.engine, "submit", lambda prompt, params: 0)
        monkeypatch.setattr(ready.engine, "has_unfinished", iter([False, True, False]).__next__)
        monkeypatch.setattr(ready.engine, "step", lambda sample=sample: [sample])
        assert ready.generate([[1]], [TWO]) == [sample]


class ImageEngine(RecordingEngine):
    image_token_id = 9

    def num_prompt_tokens(self, prompt: EnginePrompt) -> int:
        return len(prompt.token_ids) + 3 * len(prompt.images)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (EnginePrompt(token_ids=(1, 9)), "prompt 0 has 1 image placeholders .token id 9. and 0 images"),
        (EnginePrompt(token_ids=(1, 9), images=("a", "b")), "1 image placeholders .token id 9. and 2 images"),
        (EnginePrompt(token_ids=(1,), videos=("v",)), "prompt 0 comes with videos, which this engine's model does not"),
        (EnginePrompt(token_ids=(1, 9, 1, 1), images=("a",)), "prompt 0 has 7 tokens; with max_new_tokens 2"),
    ],
)
def test_images_are_checked_against_their_placeholders(prompt: EnginePrompt, text: str) -> None:
    engine = ColocatedEngine(ImageEngine())
    engine.update_weights([], version=0)
    with pytest.raises(ValueError, match=text):
        engine.generate([prompt], [TWO])
    assert len(engine.generate([EnginePrompt(token_ids=(1, 9), images=("a",))], [TWO])) == 1


def test_a_sample_is_cut_before_a_placeholder_that_it_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ColocatedEngine(ImageEngine())
    engine.update_weights([], version=0)
    drawn = Completion(
        request_id=0,
        sample_index=0,
        prompt_token_ids=(1,),
        output_token_ids=(2, 9, 3),
        logprobs=(-1.0, -2.0, -3.0),
        versions=(0, 0, 0),
        finish_reason="stop",
    )
    engine.submit([1], SamplingParams(max_new_tokens=3))
    monkeypatch.setattr(engine.engine, "step", lambda: [drawn])
    (found,) = engine.step()
    assert (found.output_token_ids, found.logprobs, found.finish_reason) == ((2,), (-1.0,), "length")


def test_the_weights_wake_before_the_cache_and_level_2_asks_for_a_sync(ready: ColocatedEngine) -> None:
    ready.engine.sleep_levels = (1, 2)
    assert (ready.sleep(2), ready.freed_bytes, ready.needs_weights) == (100, 100, True)
    ready.update_weights([], version=5)
    assert calls(ready) == ["sleep 2", "wake weights"]
    assert ready.status is EngineStatus.SLEEPED
    ready.wake()
    assert calls(ready)[2:] == ["wake kv_cache"]
    assert len(ready.generate([[1]], [TWO])) == 1
    with pytest.raises(ValueError, match=r"RecordingEngine has no sleep level 3. It has: 1, 2"):
        ready.sleep(3)


@pytest.mark.parametrize("failures", [1, 2])
def test_no_memory_to_wake_is_tried_twice_and_then_explained(
    ready: ColocatedEngine, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready.sleep()
    left = [torch.OutOfMemoryError("8 GiB wanted")] * failures

    def wake(part: EnginePart) -> None:
        if part == "kv_cache" and left:
            raise left.pop()

    monkeypatch.setattr(ready.engine, "wake", wake)
    if failures == 1:
        ready.wake()
    else:
        with pytest.raises(
            RuntimeError, match="no memory to wake the engine's kv_cache: 8 GiB wanted. Lower --engine_"
        ):
            ready.wake()
        assert ready.status is EngineStatus.SLEEPED
        ready.wake()  # resumable: the memory is there now
    assert ready.status is EngineStatus.WAKEUP


def make_engine(**_: object) -> InferenceEngine:
    return RecordingEngine()


def make_nothing(**_: object) -> None:
    return None


def test_an_engine_of_ones_own_by_import_path() -> None:
    settings = {"source": None, "tokenizer": None, "options": None, "device": torch.device("cpu")}
    made = create_engine(f"{__name__}:make_engine", **settings)  # type: ignore[arg-type]
    assert type(made).__name__ == "RecordingEngine"
    with pytest.raises(ValueError, match="which is not a lightrl InferenceEngine"):
        create_engine(f"{__name__}:make_nothing", **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Unknown engine 'nativ'. Did you mean native?"):
        check_engine_name("nativ")


class WithoutParts(RecordingEngine):
    def __init__(self, model: object) -> None: ...


class Unmeasured(RecordingEngine):
    def __init__(self, **_: object) -> None:
        super().__init__()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        raise AttributeError


def test_an_engine_of_ones_own_is_checked_before_it_is_used() -> None:
    text = r"WithoutParts' cannot be called with \(source=.*, group=\.\.\.\): .*, at line \d+ of .*test_colocated.py\."
    with pytest.raises(ValueError, match=text):
        check_engine_name(f"{__name__}:WithoutParts")
    with pytest.raises(ValueError, match="cannot be called with .* is not a callable object"):
        check_engine_name(f"{__name__}:__doc__")
    with pytest.raises(ValueError, match="Unmeasured' has vocab_size None. Set it to a number of tokens in __init__"):
        create_engine(f"{__name__}:Unmeasured", source=None, tokenizer=None, options=None, device=torch.device("cpu"))


def test_an_engine_that_does_not_return_the_bytes_it_has_freed_is_named(
    ready: ColocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(level: int) -> None: ...

    monkeypatch.setattr(ready.engine, "sleep", sleep)
    with pytest.raises(TypeError) as caught:
        ready.sleep()
    line = sleep.__code__.co_firstlineno
    assert f"sleep(), at line {line} of {__file__}: check what it returned." in called_own_code(caught.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_sampling_params_are_checked(values: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingParams(**values)  # type: ignore[arg-type]
