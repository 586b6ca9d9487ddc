"""The weights have one hash on any ranks, and another one as soon as a safeguard is left out."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from lightrl.config import GRPOConfig
from lightrl.exact.strategy import exact_strategy
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.testing import run_spmd

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "exact_program.py"


def hashes(*arguments: str, world_size: int) -> dict[str, str]:
    output = run_spmd(PROGRAM, *arguments, world_size=world_size, timeout_s=120)
    cases = [line.split() for line in output.splitlines() if "CASE" in line]
    return {" ".join(words[-3:-1]): words[-1] for words in cases}


def test_one_hash_over_ranks_and_strategies_and_others_without_a_safeguard() -> None:
    one = hashes("single,fsdp", "broken", world_size=1)
    three = hashes("ddp,fsdp", world_size=3)
    names = ("single False", "single True", "fsdp False", "fsdp True")
    assert len({*(one[name] for name in names), *three.values()}) == 1
    assert len(three) == 4
    for safeguard in ("rounding", "order", "tile"):
        assert one[f"{safeguard} False"] != one[f"{safeguard} True"], safeguard


def stepped(strategy: StrategyBase, cut: int) -> Tensor:
    """Returns 40,012 weights after 8 steps of the strategy's optimizer, kept in pieces of this many."""
    torch.manual_seed(0)
    weights = torch.randn(40_012)
    model = nn.ParameterList(nn.Parameter(piece.clone()) for piece in weights.split(cut))
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    for _ in range(8):
        gradient = torch.randn(40_012) * 1e-3
        for parameter, piece in zip(model, gradient.split(cut), strict=True):
            parameter.grad = piece.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in model])


def test_a_step_does_not_depend_on_the_size_of_a_shard() -> None:
    exact = exact_strategy(GRPOConfig(exact=True, strategy="single"))
    whole = stepped(exact, 40_012)
    assert all(torch.equal(stepped(exact, cut), whole) for cut in (7, 33, 100))
    plain = create_strategy(GRPOConfig(strategy="single"))  # its fused optimizer rounds the last elements otherwise
    assert not torch.equal(stepped(plain, 7), stepped(plain, 40_012))


def weights_after(*shares: float) -> Tensor:
    """Returns a model's weights after an update for each of the shares, which are added to the loss."""
    strategy = exact_strategy(GRPOConfig(exact=True, strategy="single"))
    strategy.setup_distributed()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    strategy.register(model, strategy.create_optimizer(model, lr=0.1))
    for share in shares:
        factor = 1.0 if share == 0 else -5.0
        strategy.train_batch(
            [torch.ones(1, 3)], lambda out, mb, share=share, factor=factor: factor * out.sum() + share, len, model=model
        )
    return model.weight.detach()


def test_an_update_that_is_dropped_leaves_no_gradient_to_the_next() -> None:
    assert torch.equal(weights_after(math.nan, 0.0), weights_after(0.0))
