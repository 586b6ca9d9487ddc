"""Strategies of the user's whose methods do not fit are refused by name, before a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightrl.config import GRPOConfig
from lightrl.strategy import create_strategy
from lightrl.strategy.base import StrategyBase, strategy_class
from lightrl.strategy.own_class import checked_class
from lightrl.strategy.torch_native import SingleStrategy, TorchStrategy
from lightrl.testing.tiny_training import fresh, tiny_policy, train
from lightrl.trainers.run import open_run


class NoRate(SingleStrategy):
    def create_optimizer(self, model: nn.Module) -> Any:  # type: ignore[override]
        return None


class OldStep(SingleStrategy):
    def optimizer_step(self, optimizer: Any) -> Any:  # type: ignore[override]
        return None


class OfConfig(SingleStrategy):
    def __init__(self, config: Any) -> None:
        super().__init__(0, 1.0, 1, 1, config)


class WithoutSuper(SingleStrategy):
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class SuperLast(SingleStrategy):
    def __init__(self, **settings: Any) -> None:
        self.rate = self.options.lr
        super().__init__(**settings)


class Forgetful(SingleStrategy):
    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Any:
        super().create_optimizer(model, **kwargs)


class Unreported(SingleStrategy):
    returned: Any = None

    def optimizer_step(self, *positional: Any, **named: Any) -> Any:
        super().optimizer_step(*positional, **named)
        return self.returned


class Discarding(SingleStrategy):
    def prepare_model(self, model: nn.Module) -> Any:
        super().prepare_model(model)


class Lonely(SingleStrategy):
    def setup_distributed(self, timeout: Any = None, num_gpu_per_node: int = 8) -> None:
        self.device = torch.device("cpu")


class Simple(StrategyBase):
    """Its model is placed by lightrl, which then keeps weight and is_boundary to itself."""

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Any: ...

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Any) -> None: ...  # type: ignore[override]

    def optimizer_step(self, optimizer: Any, model: nn.Module, scheduler: Any, name: str = "") -> Any: ...  # type: ignore[override]

    save_ckpt, load_ckpt = TorchStrategy.save_ckpt, TorchStrategy.load_ckpt


def with_any_dtype(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, model: nn.Module, dtype: Any = None) -> Any:
        return method(self, model)

    return call


class Decorated(SingleStrategy):
    @with_any_dtype
    def full_parameters(self, model: nn.Module) -> Any: ...  # type: ignore[override]

    @staticmethod
    def check_model_config(config: Any) -> None: ...  # type: ignore[override]


def test_methods_that_lightrl_cannot_call_are_named() -> None:
    with pytest.raises(ValueError, match=r"NoRate.create_optimizer\(self.* be called as .*\(model, lr=..., betas"):
        create_strategy(GRPOConfig(strategy=f"{__name__}:NoRate"))
    with pytest.raises(ValueError, match=r"OldStep.optimizer_step\(self.* cannot be called"):
        create_strategy(GRPOConfig(strategy=f"{__name__}:OldStep"))
    with pytest.raises(
        ValueError, match=r"OfConfig.__init__\(self.* as __init__\(seed=.* Write __init__\(self, \*\*set"
    ):
        create_strategy(GRPOConfig(strategy=f"{__name__}:OfConfig"))


@pytest.mark.parametrize("kind", [WithoutSuper, SuperLast])
def test_a_strategy_whose_base_is_not_initialized_is_told_so(kind: type[SingleStrategy]) -> None:
    remedy = rf"{kind.__name__} has no 'options', because .* Begin {kind.__name__}.__init__\(self, \*\*settings\) with"
    with pytest.raises(ValueError, match=remedy):
        create_strategy(GRPOConfig(strategy=f"{__name__}:{kind.__name__}")).setup_distributed()
    assert not hasattr(kind.__new__(kind), "options")  # as copy and pickle ask


def test_the_strategies_of_lightrl_take_these_calls() -> None:
    for name in ("single", "ddp", "fsdp"):
        assert checked_class(name, strategy_class(name), StrategyBase) is strategy_class(name)


def test_a_strategy_that_leaves_its_ranks_alone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"^Lonely.setup_distributed\(\) did not connect the 2 ranks, at line .*own_class"
    ):
        open_run(GRPOConfig(strategy=f"{__name__}:Lonely", output_dir=str(tmp_path / "run")), kind="grpo")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [Simple, Decorated])
def test_what_lightrl_can_call_is_taken(kind: type) -> None:
    assert checked_class("own", kind, StrategyBase) is kind


def test_a_strategy_that_returns_no_optimizer_is_named() -> None:
    strategy = create_strategy(GRPOConfig(strategy=f"{__name__}:Forgetful"))
    strategy.setup_distributed()
    with pytest.raises(TypeError, match=r"Forgetful.create_optimizer\(\) returned None. It must return an optimizer"):
        strategy.prepare_trained(tiny_policy())


def test_a_strategy_that_returns_no_model_is_named() -> None:
    strategy = create_strategy(GRPOConfig(strategy=f"{__name__}:Discarding"))
    strategy.setup_distributed()
    for prepare in (strategy.prepare_trained, strategy.prepare_frozen):
        with pytest.raises(
            TypeError, match=r"Discarding.prepare_model\(\) returned None. It must return the model that"
        ):
            prepare(tiny_policy())


@pytest.mark.parametrize("returned", [None, 0.5, (0.5, [0.1])])
def test_a_strategy_that_does_not_report_its_update_is_named(returned: Any) -> None:
    strategy = create_strategy(GRPOConfig(strategy=f"{__name__}:Unreported"))
    strategy.setup_distributed()
    strategy.returned = returned
    policy, _ = fresh(strategy)
    with pytest.raises(TypeError, match=rf"Unreported.optimizer_step\(\) returned {re.escape(repr(returned))}\."):
        train(strategy, policy, 0)


class OtherParameters(SingleStrategy):
    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Any:
        return torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)


class RateWithoutNumber(SingleStrategy):
    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=float("nan"))


class RateOfNumpy(SingleStrategy):
    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=np.float32(0.5))


def test_a_rate_may_be_any_real_number() -> None:
    strategy = create_strategy(GRPOConfig(strategy=f"{__name__}:RateOfNumpy"))
    strategy.setup_distributed()
    assert strategy.prepare_trained(tiny_policy()).optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("OtherParameters", r"of 1 parameters, 0 of them the model's\. It must train parameters of the model"),
        ("RateWithoutNumber", r"set the learning rates \[nan\]\. Each must be a finite number of at least 0"),
    ],
)
def test_an_optimizer_that_cannot_train_the_model_is_named(kind: str, told: str) -> None:
    strategy = create_strategy(GRPOConfig(strategy=f"{__name__}:{kind}"))
    strategy.setup_distributed()
    with pytest.raises(ValueError, match=rf"{kind}.create_optimizer\(\) .*{told}"):
        strategy.prepare_trained(tiny_policy())
