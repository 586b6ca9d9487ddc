from pathlib import Path

import pytest
import torch

from lightrl.config import GRPOConfig, StrategyOptions
from lightrl.strategy.layout.plain import PlainLayout
from lightrl.strategy.optim.weight_average import AverageOfModel
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[2] / "programs" / "weight_average_program.py"


def one_weight(value: float, decay: float = 0.5) -> tuple[SingleStrategy, torch.nn.Linear]:
    """SGD at rate 1 with the gradient 1: every update takes 1 away."""
    strategy = SingleStrategy(0, 0.0, 1, 1, StrategyOptions(exact_batches=True))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    strategy.register(model, torch.optim.SGD(model.parameters(), lr=1.0))
    if decay:
        strategy.keep_average(model, decay)
    return strategy, model


def update(strategy: SingleStrategy, times: int = 1, loss: float = 1.0) -> None:
    for _ in range(times):
        strategy.train_batch([torch.ones(1, 1)], lambda out, mb: out.sum() * loss, len)


def average_of(strategy: SingleStrategy, model: torch.nn.Linear) -> float:
    with strategy.averaged_weights(model):
        return model.weight.item()


def test_by_hand() -> None:
    strategy, model = one_weight(5.0)
    assert average_of(strategy, model) == 5.0
    update(strategy, 2)
    # weights 4, 3: 0.5 x 5 + 0.5 x 4 = 4.5, 0.5 x 4.5 + 0.5 x 3 = 3.75
    assert average_of(strategy, model) == 3.75
    assert model.weight.item() == 3.0
    slow, model = one_weight(5.0, decay=0.9)
    update(slow, 2)
    # 0.9 x 5 + 0.1 x 4 = 4.9, 0.9 x 4.9 + 0.1 x 3 = 4.71
    assert average_of(slow, model) == pytest.approx(4.71, abs=1e-6)


def test_a_second_call_starts_anew_and_keeps_one_copy() -> None:
    strategy, model = one_weight(5.0)
    update(strategy)
    strategy.keep_average(model, 0.9)
    assert average_of(strategy, model) == 4.0
    update(strategy)
    assert average_of(strategy, model) == pytest.approx(3.9, abs=1e-6)  # 0.9 x 4 + 0.1 x 3
    kept = [hook.tensors() for hook in strategy.trained.hooks_of(strategy.trained.entry(model).optimizer)]
    assert [len(tensors) for tensors in kept] == [1]


def test_a_skipped_update_leaves_it() -> None:
    strategy, model = one_weight(5.0)
    update(strategy)
    update(strategy, loss=float("nan"))
    assert average_of(strategy, model) == 4.5


def test_an_error_in_the_context_gives_the_weights_back() -> None:
    strategy, model = one_weight(5.0)
    update(strategy)
    with pytest.raises(KeyError), strategy.averaged_weights(model):
        raise KeyError
    assert model.weight.item() == 4.0


def test_a_checkpoint_holds_it_and_one_without_starts_it_anew(tmp_path: Path) -> None:
    strategy, model = one_weight(5.0)
    update(strategy, 2)
    strategy.save_ckpt(model, str(tmp_path / "with"))
    other, loaded = one_weight(0.0)
    other.load_ckpt(loaded, str(tmp_path / "with"))
    assert (loaded.weight.item(), average_of(other, loaded)) == (3.0, 3.75)
    other.load_ckpt(loaded, str(tmp_path / "with"), load_module_only=True)
    assert average_of(other, loaded) == 3.0
    without, model = one_weight(7.0, decay=0.0)
    without.save_ckpt(model, str(tmp_path / "without"))
    other.load_ckpt(loaded, str(tmp_path / "without"))
    assert (loaded.weight.item(), average_of(other, loaded)) == (7.0, 7.0)


def test_an_average_in_host_memory_is_not_read(tmp_path: Path) -> None:
    strategy, model = one_weight(5.0)
    update(strategy)
    strategy.save_ckpt(model, str(tmp_path))
    assert strategy.offload_optimizer() > 0
    with pytest.raises(RuntimeError, match="states are offloaded"):
        average_of(strategy, model)
    with pytest.raises(RuntimeError, match="states are offloaded"):
        strategy.load_ckpt(model, str(tmp_path), load_module_only=True)
    strategy.load_optimizer()
    assert (model.weight.item(), average_of(strategy, model)) == (4.0, 4.5)


def test_what_cannot_be_averaged_is_told() -> None:
    strategy, model = one_weight(1.0, decay=0.0)
    with pytest.raises(ValueError, match="needs float32 weights, but weight is torch.bfloat16"):
        AverageOfModel(model.bfloat16(), PlainLayout(strategy.comm), 0.5, before_writing=lambda _: None)
    with pytest.raises(ValueError, match="No average of this model's weights is kept. Call keep_average"):
        average_of(strategy, model)
    with pytest.raises(ValueError, match=r"--ema_decay is 1.0: it must be 0 \(none\) or between 0 and 1"):
        GRPOConfig(ema_decay=1.0)


@pytest.mark.slow
@pytest.mark.long
def test_every_strategy_averages_as_one_process(tmp_path: Path) -> None:
    assert run_spmd(PROGRAM, str(tmp_path), world_size=2, timeout_s=250).count("all checked") == 2
