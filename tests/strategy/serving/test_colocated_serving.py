"""ColocatedServing alone: over an engine that holds a dict of weights, and a trainer of one parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightrl.config import StrategyOptions
from lightrl.engines.base import (
    AnyPrompt,
    Completion,
    EnginePart,
    EnginePrompt,
    InferenceEngine,
    SamplingParams,
    WeightSyncError,
    as_prompt,
)
from lightrl.engines.weights.fingerprint import Fingerprint, fingerprint
from lightrl.strategy.serving.colocated_serving import ColocatedServing, OffloadingServing


class DictEngine(InferenceEngine):
    """Answers every prompt with the value of its only weight."""

    max_model_len, vocab_size, sleep_levels = 8, 100, (1, 2)

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.version = -1
        self.waiting: list[tuple[int, EnginePrompt, SamplingParams]] = []
        self.num_submitted = 0
        self.calls: list[str] = []

    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        self.waiting.append((self.num_submitted, as_prompt(prompt), params))
        self.num_submitted += 1
        return self.num_submitted - 1

    def step(self) -> list[Completion]:
        done = [
            Completion(
                request_id=request_id,
                sample_index=index,
                prompt_token_ids=prompt.token_ids,
                output_token_ids=(int(self.weights["weight"]),),
                logprobs=(0.0,),
                versions=(self.version,),
                finish_reason="stop",
            )
            for request_id, prompt, params in self.waiting
            for index in range(params.n)
        ]
        self.waiting = []
        return done

    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        self.waiting = []
        return []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.version = version

    def sleep(self, level: int = 1) -> int:
        self.calls.append(f"sleep {level}")
        self.weights = {} if level == 2 else self.weights
        return 100

    def wake(self, part: EnginePart) -> None:
        self.calls.append(f"wake {part}")

    def close(self) -> None:
        self.calls.append("close")


def dict_engine(**_: object) -> DictEngine:
    return DictEngine()


class Trainer:
    """Everything that serving asks of a strategy."""

    media = None
    global_step = 3

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.set(5.0)

    def set(self, value: float) -> None:
        nn.init.constant_(self.model.weight, value)

    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in model.named_parameters())

    def weight_fingerprints(self, model: nn.Module, dtype: torch.dtype | None) -> dict[str, Fingerprint]:
        return {name: fingerprint(parameter) for name, parameter in model.named_parameters()}

    def unwrap_model(self, model: Any) -> nn.Module:
        return model  # type: ignore[no-any-return]

    def forward(self, data: Sequence[Any], *, model: nn.Module | None = None) -> list[Any]:
        raise AssertionError("no canary is due")

    def after_forward_only(self, model: nn.Module) -> None:
        raise AssertionError("no canary is due")


PROMPTS = [EnginePrompt(token_ids=(1, 2)), EnginePrompt(token_ids=(3,))]
PARAMS = [SamplingParams(max_new_tokens=1, n=2), SamplingParams(max_new_tokens=1)]


def started(trainer: Trainer, serving: ColocatedServing, name: str = f"{__name__}:dict_engine") -> DictEngine:
    options = StrategyOptions(canary_every=0)
    engine = serving.start(name, model=trainer.model, tokenizer=None, options=options)
    assert isinstance(engine, DictEngine)
    return engine


def test_it_serves_the_trainers_weights_and_sleeps_after_each_rollout() -> None:
    trainer = Trainer()
    serving = ColocatedServing(trainer, StrategyOptions(canary_every=0))
    engine = started(trainer, serving)
    assert serving.last_sync is not None
    assert (serving.last_sync.version, serving.last_sync.num_bytes, serving.num_syncs) == (3, 4, 1)
    completions = serving.generate(PROMPTS, PARAMS)
    assert [item.prompt_token_ids for item in completions] == [(1, 2), (1, 2), (3,)]
    assert {item.output_token_ids for item in completions} == {(5,)}
    assert engine.calls == ["sleep 1"]
    trainer.set(7.0)
    trainer.global_step = 4
    assert serving.sync_weights(trainer.model).version == 4
    (completion, *_) = serving.generate(PROMPTS, PARAMS)
    assert (completion.output_token_ids, completion.versions) == ((7,), (4,))
    assert serving.generate([], []) == []
    serving.close()
    serving.close()
    assert engine.calls.count("close") == 1


def test_versions_count_the_syncs_where_nobody_sets_the_step() -> None:
    trainer = Trainer()
    trainer.global_step = 0
    options = StrategyOptions(canary_every=0, engine_sleep_level=2)  # weights are sent again before a rollout
    serving = ColocatedServing(trainer, options)
    started(trainer, serving)
    versions = []
    for value in (6.0, 7.0, 8.0):
        (completion, *_) = serving.generate(PROMPTS, PARAMS)
        versions += completion.versions
        (completion, *_) = serving.generate(PROMPTS, PARAMS)
        versions += completion.versions
        trainer.set(value)
        serving.sync_weights(trainer.model)
    assert versions == [0, 0, 1, 1, 2, 2]
    trainer.global_step = 30
    assert serving.sync_weights(trainer.model).version == 30


def test_weights_that_are_sent_again_after_a_failed_sync_have_a_version_of_their_own() -> None:
    trainer = Trainer()
    trainer.global_step = 0
    serving = ColocatedServing(trainer, StrategyOptions(canary_every=0))
    started(trainer, serving)
    trainer.set(6.0)
    whole = trainer.full_parameters
    for _ in range(2):  # a second failure counts no further: nothing was generated in between
        trainer.full_parameters = lambda *_: iter([("weight", torch.zeros(1, 1))])  # type: ignore[method-assign]
        with pytest.raises(WeightSyncError, match="weight differs from the trainer's"):
            serving.sync_weights(trainer.model)
    trainer.full_parameters = whole  # type: ignore[method-assign]
    for _ in range(2):
        (completion, *_) = serving.generate(PROMPTS, PARAMS)
        assert (completion.output_token_ids, completion.versions) == ((6,), (1,))
    assert serving.sync_weights(trainer.model).version == 2


def test_two_rollouts_can_share_one_wake_up() -> None:
    trainer = Trainer()
    serving = ColocatedServing(trainer, StrategyOptions(canary_every=0))
    engine = started(trainer, serving)
    serving.sleep()
    serving.generate(PROMPTS, PARAMS, sleep_engine=False)
    serving.generate(PROMPTS, PARAMS)
    assert engine.calls == ["sleep 1", "wake weights", "wake kv_cache", "sleep 1"]


def test_rollouts_of_one_context_share_one_wake_up_even_if_one_fails() -> None:
    trainer = Trainer()
    serving = ColocatedServing(trainer, StrategyOptions(canary_every=0))
    engine = started(trainer, serving)
    with serving.kept_awake():
        serving.generate(PROMPTS, PARAMS)
        serving.generate(PROMPTS, PARAMS)
        assert engine.calls == []
    assert engine.calls == ["sleep 1"]
    with pytest.raises(ValueError, match="prompt 0 is empty"), serving.kept_awake():
        serving.generate([EnginePrompt(token_ids=())], PARAMS[:1])
    assert engine.calls == ["sleep 1", "wake weights", "wake kv_cache", "sleep 1"]
    serving.generate(PROMPTS, PARAMS)
    assert engine.calls[4:] == ["wake weights", "wake kv_cache", "sleep 1"]


def test_an_error_puts_the_engine_to_sleep() -> None:
    trainer = Trainer()
    serving = ColocatedServing(trainer, StrategyOptions(canary_every=0))
    engine = started(trainer, serving)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        serving.generate([EnginePrompt(token_ids=())], PARAMS[:1])
    assert engine.calls == ["sleep 1"]


def test_weights_that_a_sleep_dropped_are_sent_again() -> None:
    trainer = Trainer()
    serving = ColocatedServing(trainer, StrategyOptions(canary_every=0, engine_sleep_level=2))
    engine = started(trainer, serving)
    serving.generate(PROMPTS, PARAMS)
    assert engine.weights == {}
    assert len(serving.generate(PROMPTS, PARAMS)) == 3
    assert serving.num_syncs == 2


def test_a_sync_that_sends_something_else_is_refused() -> None:
    trainer = Trainer()
    serving = ColocatedServing(trainer, StrategyOptions(canary_every=0))
    started(trainer, serving)
    trainer.full_parameters = lambda *_: iter([("weight", torch.zeros(1, 1))])  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="weight differs from the trainer's"):
        serving.sync_weights(trainer.model)
    assert serving.require_engine().needs_weights


class Careless(DictEngine):
    """Takes the weights of its first sync only."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if not self.weights:
            super().load_weights(weights, version)


def careless_engine(**_: object) -> Careless:
    return Careless()


def test_weights_that_an_engine_does_not_take_are_still_gathered_with_the_other_ranks() -> None:
    trainer, taken = Trainer(), []

    def gathered(model: nn.Module, *_: object) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            taken.append(name)  # where other ranks would wait
            yield name, parameter.detach()

    serving = ColocatedServing(trainer, StrategyOptions(canary_every=0))
    serving.group.comm.world = 2  # the other rank is as this one
    started(trainer, serving, f"{__name__}:careless_engine")
    trainer.full_parameters = gathered  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="missing weight"):
        serving.sync_weights(trainer.model)
    assert taken == ["weight"]


def test_without_an_engine_there_is_nothing_to_wake_and_nothing_to_ask() -> None:
    serving = ColocatedServing(Trainer(), StrategyOptions())
    serving.wake()
    serving.sleep()
    with pytest.raises(NotImplementedError, match="no inference engine"):
        serving.generate(PROMPTS, PARAMS)
    with pytest.raises(ValueError, match="Unknown engine 'natve'. Did you mean native?"):
        serving.start("natve", model=None, tokenizer=None, options=StrategyOptions())


def test_the_trainer_leaves_the_device_before_the_engine_wakes_and_returns_before_a_sync() -> None:
    moves: list[str] = []
    residency: Any = SimpleNamespace(
        leave_device=lambda: moves.append("leave"), return_to_device=lambda: moves.append("return")
    )
    trainer = Trainer()
    serving = OffloadingServing(trainer, StrategyOptions(canary_every=0), residency)
    serving.wake()
    serving.sleep()
    assert moves == []  # no engine wants the device
    engine = started(trainer, serving)
    engine.calls = moves
    serving.sleep()
    serving.generate(PROMPTS, PARAMS)
    assert moves == ["return", "sleep 1", "return", "leave", "wake weights", "wake kv_cache", "sleep 1", "return"]
