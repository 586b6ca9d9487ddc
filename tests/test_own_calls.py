"""An error in lightrl's own code names the user's function whose result it could not use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightrl import own_calls
from lightrl.config import GRPOConfig
from lightrl.own_calls import _described, called_own_code, is_own
from lightrl.rank_board import describe
from lightrl.strategy import create_strategy
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing.tiny_training import fresh, tiny_policy, train
from lightrl.trainers.fit import Trainer, _one_step
from lightrl.trainers.lifetime import _refuse


class Groupless(SingleStrategy):
    def group_batches(self, data: Sequence[Any]) -> Any: ...


class Normless(SingleStrategy):
    def apply_gradients(self, *positional: Any) -> Any:
        super().apply_gradients(*positional)


class Weightless(SingleStrategy):
    def full_parameters(self, model: nn.Module, dtype: Any = None) -> Any: ...


class Layoutless(SingleStrategy):
    def make_layout(self) -> Any: ...


class Raising(SingleStrategy):
    def group_batches(self, data: Sequence[Any]) -> Any:
        raise TypeError("'NoneType' object, which this line of the user's names")


class Stepless(Trainer):
    """A trainer of which one step is taken, without the rest of a run."""

    step_index, observers, watch = 0, (), None

    def __init__(self) -> None: ...

    def step(self) -> Any: ...

    def finish_step(self) -> None: ...

    def evaluate(self) -> dict[str, float]:
        return {}


class Log:
    def write_samples(self, experience: Any) -> None: ...


def strategy_of(kind: type) -> SingleStrategy:
    strategy: Any = create_strategy(GRPOConfig(strategy=f"{__name__}:{kind.__name__}", canary_every=0))
    strategy.setup_distributed()
    return strategy


def update(strategy: SingleStrategy) -> None:
    policy, _ = fresh(strategy)
    train(strategy, policy, 0)


def sync(strategy: SingleStrategy) -> None:
    strategy.setup_inference_engine(strategy.args, "native", actor=strategy.prepare_model(tiny_policy()))


def prepare(strategy: SingleStrategy) -> None:
    strategy.prepare_trained(tiny_policy())


def error_of(act: Callable[..., None], kind: type) -> TypeError | AttributeError:
    with pytest.raises((TypeError, AttributeError)) as caught:
        act(strategy_of(kind))
    return caught.value


@pytest.mark.parametrize(
    ("act", "kind", "method"),
    [
        (update, Groupless, "group_batches"),
        (update, Normless, "apply_gradients"),
        (sync, Weightless, "full_parameters"),
        (prepare, Layoutless, "make_layout"),  # by setup_distributed(), long before it is used
    ],
)
def test_a_method_that_returned_nothing_is_named(act: Callable[..., None], kind: type, method: str) -> None:
    line = getattr(kind, method).__code__.co_firstlineno
    told = f"lightrl had called {kind.__name__}.{method}(), at line {line} of {__file__}: check what it returned."
    description = describe(error_of(act, kind)).splitlines()[-1]
    assert description.startswith(told)
    assert " Its description: " in description  # that of lightrl's own method, which it overrides


def test_a_result_that_is_used_in_a_later_line_is_traced_to_its_function() -> None:
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'experience'") as caught:
        _one_step(Stepless(), Log())  # type: ignore[arg-type]
    assert called_own_code(caught.value).startswith("lightrl had called Stepless.step(), at line ")
    assert "Draws the batch of step step_index and learns from it once." in describe(caught.value)


def test_an_error_in_the_users_own_line_is_left_alone() -> None:
    assert called_own_code(error_of(update, Raising)) == ""


def test_an_error_of_lightrl_alone_names_no_function() -> None:
    with pytest.raises(NotImplementedError, match="no inference engine") as caught:
        create_strategy(GRPOConfig(strategy="single")).serving.require_engine()
    assert called_own_code(caught.value) == ""


def test_an_error_is_never_hidden_by_one_of_the_search_for_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(update, Groupless)

    def fails(*given: object) -> Any:
        raise RuntimeError("an attribute of the user's")

    monkeypatch.setattr(own_calls, "_own_functions", fails)
    assert called_own_code(error) == ""
    assert "NoneType" in describe(error)


def test_a_function_in_an_attribute_has_its_own_name() -> None:
    runner = SimpleNamespace(reward=without_result)
    assert _described(without_result, runner).startswith("lightrl had called without_result(), at line ")
    assert "Its description" not in _described(without_result, runner)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/project/my_strategy.py", True),
        ("/user/lib/python3.11/site-packages/torch/nn/module.py", False),
        ("/usr/lib/python3/dist-packages/torch/nn/module.py", False),
        ("<string>", False),
    ],
)
def test_packages_are_not_the_users_code_wherever_they_are_installed(path: str, expected: bool) -> None:
    assert is_own(Path(path)) is expected


def without_result() -> None: ...


def test_a_mistake_before_the_training_names_the_function_too(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(update, Groupless)
    _refuse(error, error)
    assert "non-iterable NoneType object\nlightrl had called Groupless.group_batches()" in capsys.readouterr().err
