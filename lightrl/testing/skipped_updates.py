"""A check of StrategyContract: if there is nothing to learn from, all ranks skip the update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightrl.records import PackedBatch, TokenScores
from lightrl.strategy.base import StrategyBase
from lightrl.testing.tiny_training import fresh, loss_fn, my_batches, num_tokens, parameters, same, train


def check_updates_that_are_not_made(strategy: StrategyBase) -> None:
    """Checks that nothing moves if a loss is not finite on one rank or no rank has data, and that training goes on.

    The gradient of that loss is finite, and without a gradient momentum alone would move the weights.
    """
    policy, optimizer = fresh(strategy)
    reference, its_optimizer = fresh(strategy)
    for model, its in ((policy, optimizer), (reference, its_optimizer)):
        schedule = torch.optim.lr_scheduler.LambdaLR(its, lambda update: 1 / (1 + update))
        strategy.trained.add(model, its, schedule)
        train(strategy, model, 0)
    before, rates = parameters(strategy, policy), [group["lr"] for group in optimizer.param_groups]
    is_last = strategy.comm.rank == strategy.comm.world - 1

    def poisoned(scores: TokenScores, batch: PackedBatch) -> Tensor:
        return loss_fn(scores, batch) + (math.nan if is_last else 0.0)

    bad = strategy.train_batch(my_batches(strategy, 1), poisoned, num_tokens, model=policy)
    assert bad.skipped
    assert "The loss is nan" in bad.reason
    empty = strategy.train_batch(my_batches(strategy, 1), loss_fn, lambda batch: 0.0, model=policy)
    assert (empty.skipped, empty.loss, empty.total_weight) == (True, 0.0, 0.0)
    assert "nothing to train" in empty.reason
    for batch in strategy.group_batches(my_batches(strategy, 1)[:1]).batches:
        strategy.backward(poisoned(policy(batch), batch), policy, optimizer)
    by_calls = strategy.optimizer_step(optimizer, policy, strategy.trained.entry(policy).scheduler, is_boundary=True)
    assert by_calls.skipped
    same(parameters(strategy, policy), before)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    found, wanted = train(strategy, policy, 2), train(strategy, reference, 2)
    assert (found.loss, found.grad_norm, found.lr, found.skipped, found.reason) == (
        wanted.loss, wanted.grad_norm, wanted.lr, False, ""
    )  # fmt: skip
    same(parameters(strategy, policy), parameters(strategy, reference))
