"""A run's config is what its strategy reads: the same object, and each option declared in one class."""

import dataclasses

import pytest

from lightrl.config import (
    DPOConfig,
    EngineConfig,
    GRPOConfig,
    PPOConfig,
    RMConfig,
    RunConfig,
    SFTConfig,
    StrategyOptions,
    TrainingConfig,
    parse_config,
)
from lightrl.strategy import create_strategy

KINDS = (GRPOConfig, PPOConfig, SFTConfig, RMConfig, DPOConfig)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strategy_holds_the_config_itself(kind: type[RunConfig]) -> None:
    config = kind(lr=3e-4)
    strategy = create_strategy(config)
    assert strategy.options is config
    config.optim.max_norm = 7.0
    assert strategy.options.optim.max_norm == 7.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_every_option_of_a_strategy_with_the_same_default(kind: type[RunConfig]) -> None:
    run, alone = kind(), StrategyOptions()
    differing = [
        item.name
        for item in dataclasses.fields(StrategyOptions)
        if getattr(run, item.name) != getattr(alone, item.name)
    ]
    assert differing == ["exact_batches"]  # trainers give whole batches, other callers may accumulate over calls


def test_an_option_of_a_strategy_is_declared_once() -> None:
    family = {kind for run in KINDS for kind in run.__mro__ if dataclasses.is_dataclass(kind)}
    for name in {item.name for item in dataclasses.fields(StrategyOptions)}:
        declaring = [kind for kind in family if name in vars(kind).get("__annotations__", {})]
        settable = [kind.__name__ for kind in declaring if vars(kind)["__dataclass_fields__"][name].init]
        assert len(settable) == 1, (name, settable)


def test_sections_are_one_class_for_all() -> None:
    assert issubclass(GRPOConfig, EngineConfig)
    assert issubclass(SFTConfig, TrainingConfig)
    assert issubclass(RunConfig, StrategyOptions)


def test_a_run_without_an_engine_has_no_option_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(SFTConfig, ["--engine", "vllm"])
    assert "--engine" in capsys.readouterr().err
    with pytest.raises(TypeError, match="unexpected keyword argument 'critic_lr'"):
        GRPOConfig(critic_lr=0.1)  # type: ignore[call-arg]
