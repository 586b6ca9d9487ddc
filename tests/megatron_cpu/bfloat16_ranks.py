"""What a rank of a test of --dtype bfloat16 does: checks of the contract that need no float32 result, and ours."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoModel

from lightrl.comm import RankError
from lightrl.config import GRPOConfig, parse_config
from lightrl.engines.base import WeightSyncError
from lightrl.models.critic import Critic, ValueHead
from lightrl.plan.models import critic_of, policy_of
from lightrl.plan.rectangles import stage_bytes
from lightrl.records import PackedBatch, StateValues
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.strategy.megatron.main_copies import copies_of
from lightrl.strategy.megatron.placing import placed_of
from lightrl.testing import strategy_checks as checks
from lightrl.testing.tiny_training import (
    adamw,
    expect,
    fresh,
    my_batches,
    num_tokens,
    parameters,
    same,
    tiny_policy,
    train,
    trainable,
)

CHECKS = [
    checks.check_same_weights_everywhere,
    checks.check_state_dict_modes,
    checks.check_global_norm_and_clipping,
    checks.check_nan_on_one_rank,
    checks.check_offload,
    checks.check_checkpoint,
]


def held_bytes(model: nn.Module) -> tuple[int, int]:
    """Returns the bytes of the weights that compute on this rank, and of the main copies."""
    weights = {id(item): item.nbytes for stage in placed_of(model).stages for item in stage.parameters()}
    copies = copies_of(model)
    return sum(weights.values()), 0 if copies is None else sum(item.nbytes for item in copies.main())


def check_weight_sync(strategy: StrategyBase) -> None:
    """The engine gets the trained weights as bfloat16 numbers, with a proof that finds stale ones, and a canary."""
    policy, _ = fresh(strategy)
    train(strategy, policy, 0)
    strategy.setup_inference_engine(None, "native", actor=policy)
    report = strategy.serving.last_sync
    assert report is not None
    assert report.canary is not None
    assert report.canary < 0.1, report
    honest = strategy.full_parameters

    def stale(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor - 0.1 if name == checks.VICTIM else tensor) for name, tensor in honest(*args))

    strategy.full_parameters = stale  # type: ignore[assignment, method-assign]
    expect((WeightSyncError, RankError), checks.VICTIM, lambda: strategy.update_engine_weights(policy))
    strategy.full_parameters = honest  # type: ignore[method-assign]
    train(strategy, policy, 1)
    strategy.update_engine_weights(policy)
    assert strategy.engine is not None
    strategy.engine.close()
    strategy.serving.engine = None


def check_main_copies(strategy: StrategyBase) -> None:
    """The main copies are what trains; without them passes go on, and nothing else does."""
    policy, optimizer = fresh(strategy)
    train(strategy, policy, 0)
    copies = copies_of(policy)
    assert copies is not None
    size = sum(item.nbytes for item in copies.main())
    batch = my_batches(strategy, 1)[:1]
    wanted, weights = strategy.forward(batch)[0].logprobs, parameters(strategy, policy)
    assert all(value.dtype == torch.float32 for value in weights.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in weights.values())

    assert strategy.offload_megatron_copy_params(optimizer) == size
    assert strategy.offload_megatron_copy_params([optimizer]) == 0
    assert_close(strategy.forward(batch)[0].logprobs, wanted, atol=0, rtol=0)
    expect(RuntimeError, "load_megatron_copy_params()", lambda: parameters(strategy, policy))
    expect(RuntimeError, "load_megatron_copy_params()", lambda: train(strategy, policy, 1))
    expect(RuntimeError, "load_megatron_copy_params()", lambda: strategy.save_ckpt(policy, tempfile.gettempdir()))
    freed = strategy.offload_param_and_grad()  # the others
    assert strategy.load_param_and_grad() == freed
    assert strategy.load_megatron_copy_params(optimizer) == size
    same(parameters(strategy, policy), weights)

    everything = strategy.offload_param_and_grad()  # both; parameters alone were `freed`
    assert everything == size + freed
    assert strategy.offload_megatron_copy_params(optimizer) == 0
    assert strategy.load_param_and_grad() == everything
    train(strategy, policy, 1)


def check_critic_and_reference(strategy: StrategyBase) -> None:
    """A critic's head computes in float32; a frozen model is rounded, has no copies, and scores."""
    torch.manual_seed(0)
    build: Any = lambda: Critic(AutoModel.from_config(tiny_policy().hf.config), ValueHead(35))  # noqa: E731
    alone = build()
    model = build()
    model.load_state_dict(alone.state_dict())
    model = strategy.prepare_model(model)
    strategy.register(model, adamw(trainable(model)))
    batch = my_batches(strategy, 0)[:1]
    found, wanted = strategy.forward(batch, model=model)[0].values, alone(batch[0]).values
    assert found.dtype == torch.float32
    assert_close(found, wanted.detach(), atol=3e-2, rtol=0)

    def squares(states: StateValues, pack: PackedBatch) -> torch.Tensor:
        return (torch.where(pack.loss_mask, states.values - 1.0, 0.0).square().sum()) / num_tokens(pack).clamp(min=1)

    losses = [strategy.train_batch(my_batches(strategy, 0), squares, num_tokens, model=model).loss for _ in range(20)]
    assert losses[-1] < losses[0] - 0.05, losses

    frozen = strategy.prepare_frozen(tiny_policy())
    assert held_bytes(frozen)[1] == 0
    scores = strategy.forward(batch, model=frozen)[0].logprobs
    assert_close(scores, tiny_policy()(batch[0]).logprobs.detach(), atol=3e-2, rtol=0)


def check_plan(strategy: StrategyBase, config: GRPOConfig) -> None:
    """The largest stage has what the plan says, to the byte."""
    config = replace(config, strategy="megatron")
    body = tiny_policy().hf.config
    torch.manual_seed(0)
    policy, frozen = strategy.prepare_model(tiny_policy()), strategy.prepare_frozen(tiny_policy())
    critic = strategy.prepare_model(Critic(AutoModel.from_config(body), ValueHead(35)))
    planned = (policy_of(body, config), policy_of(body, config, role="reference"), critic_of(body, config))
    for model, plan in zip((policy, frozen, critic), planned, strict=True):
        said = stage_bytes(plan, config, strategy.comm.world)
        held = max(strategy.comm.all_gather_object(held_bytes(model)))
        assert held == (said.weights, said.main), (plan.role, held, said)


def main() -> None:
    config = parse_config(GRPOConfig, sys.argv[1:])
    strategy = create_strategy(config)
    strategy.setup_distributed()
    for check in (*CHECKS, check_weight_sync, check_main_copies, check_critic_and_reference):
        strategy.trained.entries.clear()
        strategy.max_norm = 1.0
        check(strategy)
        strategy.comm.barrier()
    check_plan(strategy, config)
    strategy.close()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        sys.stderr.write(f"{traceback.format_exc()}\n")
        sys.stderr.flush()
        raise SystemExit(1) from None
