"""The scale by hand, and steps with and without it."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightrl.config import StrategyOptions
from lightrl.strategy.optim.grad_scaler import GradScaler
from lightrl.strategy.torch_native import SingleStrategy


def test_the_scale_by_hand() -> None:
    scaler = GradScaler(True, init_scale=8.0, growth_interval=2)
    scales = []
    for is_finite in (True, True, True, False, True, False, True, True):
        scaler.update(is_finite)
        scales.append(scaler.get_scale())
    # two good steps double it; a bad one halves it and starts the count anew
    assert scales == [8, 16, 16, 8, 8, 4, 4, 8]
    assert float(scaler.scale(torch.tensor(0.5))) == 4.0
    other = GradScaler(True)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() == {"scale": 8.0, "good_steps": 0.0}


def test_disabled_it_is_the_identity() -> None:
    scaler, loss = GradScaler(False), torch.tensor(0.5)
    scaler.update(False)
    assert scaler.scale(loss) is loss
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})


@pytest.mark.parametrize(
    "wrong", [{"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}]
)
def test_impossible_numbers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        GradScaler(True, **wrong)  # type: ignore[arg-type]


def trained(steps: int, *, scale: float | None, poison: int = -1) -> tuple[torch.Tensor, SingleStrategy, list[bool]]:
    """A linear layer after some steps; at the step `poison` the loss is infinite."""
    strategy = SingleStrategy(0, 0.5, 1, 1, StrategyOptions(lr=0.1))
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = strategy.build_optimizer(model)
    if scale:
        strategy.build_grad_scaler(True, init_scale=scale)
    skipped = []
    for step in range(steps):
        loss = model(torch.ones(1, 3)).square().sum() * (float("inf") if step == poison else 1.0)
        strategy.backward(loss, model, optimizer)
        skipped.append(strategy.optimizer_step(optimizer, model, None).skipped)
    return model.weight.detach(), strategy, skipped


def test_training_is_the_same_with_it_and_a_bad_step_lowers_it() -> None:
    plain, _, _ = trained(3, scale=None)
    scaled, strategy, skipped = trained(3, scale=1024.0)
    assert_close(scaled, plain, atol=1e-6, rtol=0)
    assert (strategy.grad_scaler.get_scale(), skipped) == (1024.0, [False] * 3)
    after_skip, strategy, skipped = trained(4, scale=1024.0, poison=1)
    assert_close(after_skip, plain, atol=1e-6, rtol=0)
    assert (strategy.grad_scaler.get_scale(), skipped) == (512.0, [False, True, False, False])


def test_a_checkpoint_keeps_the_scale_and_its_good_steps(tmp_path: Path) -> None:
    def scaled(init_scale: float) -> tuple[SingleStrategy, nn.Module]:
        strategy, model = SingleStrategy(0, 0.5, 1, 1, StrategyOptions(lr=0.1)), nn.Linear(1, 1)
        strategy.register(model, strategy.build_optimizer(model))
        strategy.build_grad_scaler(True, init_scale=init_scale)
        return strategy, model

    first, model = scaled(1024.0)
    for is_finite in (False, True):
        first.grad_scaler.update(is_finite)
    first.save_ckpt(model, str(tmp_path))
    second, model = scaled(8.0)
    second.load_ckpt(model, str(tmp_path))
    assert second.grad_scaler.state_dict() == {"scale": 512.0, "good_steps": 1.0}


def test_the_step_of_one_model_leaves_the_scale_of_the_gradients_of_another() -> None:
    strategy, models = SingleStrategy(0, 0.0, 1, 1), [nn.Linear(1, 1, bias=False) for _ in range(2)]
    scaler = strategy.build_grad_scaler(True, init_scale=8.0)
    first, second = (torch.optim.SGD(model.parameters(), lr=1.0) for model in models)
    strategy.backward(models[0](torch.ones(1, 1)).sum(), models[0], first)
    strategy.backward(models[1](torch.full((1, 1), float("inf"))).sum(), models[1], second)
    assert strategy.optimizer_step(second, models[1], None).skipped
    assert scaler.get_scale() == 4.0
    assert strategy.optimizer_step(first, models[0], None).grad_norm == 1.0  # 8 / 8
    strategy.backward(models[0](torch.ones(1, 1)).sum(), models[0], first)
    assert models[0].weight.grad is not None
    assert float(models[0].weight.grad) == 4.0
