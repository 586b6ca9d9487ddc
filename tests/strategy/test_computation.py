"""Compiled blocks: the same training, no new graphs for new lengths, and what is refused."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import nn
from torch.testing import assert_close

from lightrl.config import GRPOConfig, LoraConfig, StrategyOptions, parse_config
from lightrl.models import lora
from lightrl.strategy import create_strategy
from lightrl.strategy.computation import check_compiler, compile_blocks, enable_gradient_checkpointing
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing.tiny_training import make_batch, parameters, samples, sgd, tiny_policy, train, trainable

STEPS = 4


def strategy_with(**options: Any) -> SingleStrategy:
    strategy = SingleStrategy(0, 0.0, 1, 1, StrategyOptions(exact_batches=True, **options))
    strategy.setup_distributed()
    return strategy


def train_steps(strategy: SingleStrategy, policy: nn.Module) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each, with a pass without gradients between."""
    strategy.register(policy, sgd(trainable(policy)))
    found = []
    for step in range(STEPS):
        strategy.forward([make_batch(samples(step))], model=policy)
        result = train(strategy, policy, step)
        found.append((result.loss, result.grad_norm))
    return found


def num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)  # beyond it torch would go on without compiling
def test_compiled_blocks_train_alike_and_are_made_once() -> None:
    """By dynamo alone: what it traces, and when anew, is the same for every compiler behind it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pair = []
    for is_compiled in (False, True):
        strategy, policy = strategy_with(), tiny_policy()
        lora.add_adapters(policy.hf, LoraConfig(rank=2), seed=0)
        enable_gradient_checkpointing(policy.hf)
        names = [name for name, _ in policy.named_parameters()]
        if is_compiled:
            compile_blocks(policy, backend="eager")
            compile_blocks(policy, backend="eager")  # changes nothing
        pair.append((train_steps(strategy, policy), parameters(strategy, policy)))
        assert [name for name, _ in policy.named_parameters()] == names
    (plain, plain_weights), (compiled, compiled_weights) = pair
    assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-5, rtol=0)
    for name, value in plain_weights.items():
        assert_close(compiled_weights[name], value, atol=1e-5, rtol=0)
    before = num_graphs()
    # Before and after attention, of the block and of its attention: 4; with gradients and without; and anew where the
    # first block's input needs none.
    assert 0 < before <= 12
    train_steps(strategy, policy)
    strategy.forward([make_batch(samples(9, count=3))], model=policy)
    assert num_graphs() == before  # whatever the lengths


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_option_compiles_for_this_machine() -> None:
    torch._dynamo.reset()
    plain = train_steps(strategy_with(), tiny_policy())
    strategy, policy = strategy_with(compile=True), tiny_policy()
    compiled = train_steps(strategy, policy)
    assert num_graphs() > 0
    assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-5, rtol=0)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="finds no 'no-such-compiler'"):
        check_compiler(torch.device("cpu"))
    pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match="--compile does not go with --strategy deepspeed"):
        create_strategy(parse_config(GRPOConfig, ["--strategy", "deepspeed", "--compile", "True"]))
