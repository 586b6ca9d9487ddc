"""One process under the contract of all strategies."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightrl.config import StrategyOptions
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import StrategyContract
from lightrl.testing.tiny_training import adamw, loss_fn, make_batch, samples, tiny_policy


class TestSingle(StrategyContract):
    strategy = "single"
    world_sizes = (1,)


def test_no_loss_is_read_before_the_last_micro_batch_has_been_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, reading one waits for everything that was started before."""
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True))
    policy = strategy.prepare_model(tiny_policy())
    strategy.register(policy, adamw(policy.parameters()))
    batches = [make_batch([sample]) for sample in samples(0, count=3)]
    events, read, backward = [], Tensor.__float__, strategy.backward

    def noted_read(tensor: Tensor) -> float:
        events.append("read")
        return read(tensor)

    def noted_backward(*args: Any, **kwargs: Any) -> None:
        events.append("backward")
        backward(*args, **kwargs)

    monkeypatch.setattr(Tensor, "__float__", noted_read)
    monkeypatch.setattr(strategy, "backward", noted_backward)
    strategy.train_batch(batches, loss_fn, lambda batch: 1.0)
    assert events[:6] == ["backward"] * 3 + ["read"] * 3


def test_a_forward_that_fails_leaves_the_model_in_training_mode() -> None:
    strategy, model = SingleStrategy(0, 0.0, 1, 1), nn.Linear(2, 1)
    with pytest.raises(RuntimeError, match="shapes"):
        strategy.forward([torch.ones(1, 3)], model=model)
    assert model.training
