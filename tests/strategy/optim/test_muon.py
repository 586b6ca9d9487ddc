from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightrl.config import GRPOConfig, OptimConfig, StrategyOptions
from lightrl.strategy import create_strategy
from lightrl.strategy.optim.muon import MuonWithAdamW
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing.tiny_training import loss_fn, make_batch, num_tokens, samples, tiny_policy


def gradients(model: torch.nn.Module, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def stepped(make: Callable[[torch.nn.Module], list[torch.optim.Optimizer]]) -> dict[str, Tensor]:
    model = tiny_policy()
    optimizers = make(model)
    for step in range(3):
        gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_it_steps_as_torchs_own_two() -> None:
    def ours(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        optim = OptimConfig(name="muon", weight_decay=0.1, momentum=0.9, betas=(0.8, 0.99))
        strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True, lr=0.01, optim=optim))
        optimizer = strategy.create_optimizer(model)
        assert isinstance(optimizer, MuonWithAdamW)
        return [optimizer]

    def torchs(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if "layers." in name and p.dim() == 2]
        others = [p for name, p in named if "layers." not in name and p.dim() == 2]
        vectors = [p for _, p in named if p.dim() < 2]
        muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        settings = {"lr": 0.01, "betas": (0.8, 0.99), "fused": True}
        return [
            muon,
            torch.optim.AdamW(others, weight_decay=0.1, **settings),  # type: ignore[arg-type]
            torch.optim.AdamW(vectors, weight_decay=0.0, **settings),  # type: ignore[arg-type]
        ]

    found, wanted = stepped(ours), stepped(torchs)
    for name, value in wanted.items():
        assert_close(found[name], value, atol=0, rtol=0)


def test_one_step_by_hand() -> None:
    """A matrix whose singular values are equal is orthogonalised to a multiple of itself: the step is known."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])
    weight = model.layers[0].weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.nn.Parameter)
    torch.nn.init.zeros_(weight)
    optim = OptimConfig(name="muon", momentum=0.0)
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True, lr=1.0, optim=optim))
    optimizer = strategy.create_optimizer(model)
    weight.grad = torch.tensor([[0.0, -3.0], [3.0, 0.0]])
    optimizer.step()
    # normalised to s = 1/sqrt(2), then five times s <- 3.4445 s - 4.775 s^3 + 2.0315 s^5, in bfloat16
    s = 2**-0.5
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    # times lr x 0.2 sqrt(max(2, 2)), against the gradient
    size = 0.2 * 2**0.5 * s
    assert_close(weight.detach(), torch.tensor([[0.0, size], [-size, 0.0]]), atol=0.02, rtol=0)


def test_it_steps_by_the_groups_that_a_state_brought() -> None:
    model = tiny_policy()
    optim = OptimConfig(name="muon", weight_decay=0.1)
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True, lr=1.0, optim=optim))
    optimizer = strategy.create_optimizer(model)
    optimizer.load_state_dict(optimizer.state_dict())  # puts new dictionaries into param_groups
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients(model, 0)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_schedule_and_a_resume_reach_both(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        config = GRPOConfig(lr=0.01, max_steps=4, optim=OptimConfig(name="muon", schedule="linear"))
        strategy = create_strategy(config)
        (policy, optimizer, _), *_ = strategy.prepare_models_and_optimizers(
            tiny_policy(seed=len(found)), None, None, None, strategy.args, 4
        )
        strategy.load_ckpt(policy, str(tmp_path))
        for step in range(2) if not found else (2,):
            strategy.train_batch([make_batch(samples(step))], loss_fn, num_tokens)
        rates = {group["is_muon"]: group["lr"] for group in optimizer.param_groups}
        if not found:
            assert rates == {True: 0.005, False: 0.005}  # half of the way
            strategy.save_ckpt(policy, str(tmp_path), max_mem=0)
            strategy.train_batch([make_batch(samples(2))], loss_fn, num_tokens)
        else:
            assert rates == {True: 0.0025, False: 0.0025}
        found.append({name: parameter.detach().clone() for name, parameter in policy.named_parameters()})
    for name, value in found[0].items():
        assert_close(found[1][name], value, atol=0, rtol=0)


@pytest.mark.parametrize(("saved", "now"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_states_of_another_optimizer_are_refused(
    saved: Literal["adamw", "muon"], now: Literal["adamw", "muon"], tmp_path: Path
) -> None:
    for name in (saved, now):
        strategy = create_strategy(GRPOConfig(optim=OptimConfig(name=name)))
        (policy, optimizer, _), *_ = strategy.prepare_models_and_optimizers(
            tiny_policy(), None, None, None, strategy.args, 4
        )
        if name == saved:
            strategy.train_batch([make_batch(samples(0))], loss_fn, num_tokens)
            strategy.save_ckpt(policy, str(tmp_path), max_mem=0)
    with pytest.raises(ValueError, match=f"that {type(optimizer).__name__} cannot continue. Give the --optim.name"):
        strategy.load_ckpt(policy, str(tmp_path))
    strategy.load_ckpt(policy, str(tmp_path), load_optimizer_states=False)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_where_matrices_are_sharded_it_is_refused(strategy: str) -> None:
    pytest.importorskip("deepspeed") if strategy == "deepspeed" else None
    chosen = create_strategy(GRPOConfig(strategy=strategy, optim=OptimConfig(name="muon")))
    with pytest.raises(
        ValueError, match="muon needs whole matrices, which .* does not keep .*--strategy ddp or single"
    ):
        chosen.create_optimizer(tiny_policy())
