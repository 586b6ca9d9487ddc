"""Checks averaged weights, groups of several rates, Muon, and mixed weights under every strategy, on 2 ranks.

Each strategy must give the numbers of one process, whose average is computed here from the weights after every update.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from torch.testing import assert_close

from lightrl.config import DeepSpeedConfig, OptimConfig, StrategyOptions
from lightrl.strategy import strategy_class
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.strategy.weight_mixing import mix_into
from lightrl.testing.tiny_training import (
    EVERYTHING,
    loss_fn,
    make_batch,
    num_tokens,
    parameters,
    same,
    samples,
    tiny_policy,
    train,
)

DECAY = 0.75
UPDATES = 3
OPTIM = OptimConfig(weight_decay=0.1, decay_embeddings=False, lr_scales=("layers.0=0.5", "norm=2"))

CASES = {"ddp": ("ddp", {}), "fsdp": ("fsdp", {})}
if importlib.util.find_spec("deepspeed") is not None:
    for stage, threshold in ((0, 0), (1, 0), (2, 0), (3, 0), (3, 2000)):  # the last keeps small weights whole as well
        settings = {"zero_stage": stage, "param_persistence_threshold": threshold}
        CASES[f"ZeRO-{stage}, {threshold}"] = ("deepspeed", {"deepspeed": DeepSpeedConfig(**settings)})


def make(name, **settings):
    options = StrategyOptions(exact_batches=True, lr=1e-2, optim=OPTIM, **settings)
    strategy = strategy_class(name)(0, 1.0, 1, 1, options)
    strategy.setup_distributed()
    return strategy


def prepared(strategy, seed=0):
    (policy, optimizer, _), *_ = strategy.prepare_models_and_optimizers(
        tiny_policy(seed=seed), None, None, None, None, 10
    )
    return policy, optimizer


def alone():
    """In this process, as if there were no other rank: (weights, average) after each update."""
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True, lr=1e-2, optim=OPTIM))
    strategy.comm.rank, strategy.comm.world, strategy.comm.is_distributed = 0, 1, True
    policy, _ = prepared(strategy)
    average = parameters(strategy, policy)
    history = []
    for step in range(UPDATES):
        strategy.train_batch([make_batch(samples(step)[:EVERYTHING])], loss_fn, num_tokens, model=policy)
        weights = parameters(strategy, policy)
        average = {name: DECAY * average[name] + (1 - DECAY) * value for name, value in weights.items()}
        history.append((weights, average))
    return history


def averages(strategy, policy):
    with strategy.averaged_weights(policy):
        return parameters(strategy, policy)


def close(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert_close(found[name], value, atol=1e-4, rtol=0, msg=name)  # AdamW: a gradient of 1e-9 is a step of lr


def check(name, settings, history, folder):
    strategy = make(name, **settings)
    policy, optimizer = prepared(strategy)
    strategy.keep_average(policy, DECAY)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.005, 0.01, 0.02]
    same(averages(strategy, policy), parameters(strategy, policy))  # it starts as the weights
    for step in range(2):
        train(strategy, policy, step)
    close(parameters(strategy, policy), history[1][0])
    close(averages(strategy, policy), history[1][1])
    before, average = parameters(strategy, policy), averages(strategy, policy)
    same(parameters(strategy, policy), before)

    strategy.set_global_step(2)
    strategy.save_ckpt(policy, str(folder), max_mem=0)
    other, _ = prepared(strategy, seed=3)
    strategy.keep_average(other, DECAY)
    strategy.load_ckpt(other, str(folder))
    same(parameters(strategy, other), before)
    same(averages(strategy, other), average)
    freed = strategy.offload_optimizer()  # the average goes with it
    strategy.load_optimizer()
    for trained in (policy, other):
        train(strategy, trained, 2)
        close(parameters(strategy, trained), history[2][0])
        close(averages(strategy, trained), history[2][1])
    same(averages(strategy, other), averages(strategy, policy))

    plain = make(name, **settings)
    third, _ = prepared(plain, seed=3)
    plain.load_ckpt(third, str(folder))  # whoever keeps no average reads the rest
    same(parameters(plain, third), before)
    assert freed > plain.offload_optimizer() > 0
    plain.load_optimizer()
    check_mixing(strategy, policy, folder)


def check_mixing(strategy, policy, folder):
    """A frozen model becomes the policy, then takes over a quarter of a third one; a checkpoint holds it."""

    def scores(model):
        return strategy.forward([make_batch(samples(0)[:EVERYTHING])], model=model)[0].logprobs

    frozen, other = (strategy.prepare_frozen(tiny_policy(seed=seed)) for seed in (5, 6))
    assert not torch.equal(scores(frozen), scores(policy))  # the passes gather what is sharded
    mix_into(frozen, policy, 1.0, strategy)
    same(parameters(strategy, frozen), parameters(strategy, policy))
    assert torch.equal(scores(frozen), scores(policy))
    old, new = parameters(strategy, frozen), parameters(strategy, other)
    mix_into(frozen, other, 0.25, strategy)
    mixed = parameters(strategy, frozen)
    for name, value in mixed.items():
        assert_close(value, 0.25 * new[name] + 0.75 * old[name], atol=1e-6, rtol=0, msg=name)
    assert not torch.equal(scores(frozen), scores(policy))
    same(parameters(strategy, policy), old)
    strategy.set_global_step(9)
    strategy.save_ckpt(policy, str(folder), max_mem=0, companions={"reference": frozen})
    strategy.load_ckpt(policy, str(folder), companions={"reference": other})
    same(parameters(strategy, other), mixed)
    assert torch.equal(scores(other), scores(frozen))


def check_muon_on_replicas():
    """Every rank steps whole matrices; Muon's bfloat16 rounds the last bits of a gradient to a part in a thousand."""
    found = []
    for name in ("ddp", "single"):
        options = StrategyOptions(exact_batches=True, lr=1e-2, optim=OptimConfig(name="muon"))
        strategy = strategy_class(name)(0, 1.0, 1, 1, options)
        if name == "ddp":
            strategy.setup_distributed()
        else:
            strategy.comm.rank, strategy.comm.world, strategy.comm.is_distributed = 0, 1, True
        policy, _ = prepared(strategy)
        found.append([train(strategy, policy, step).loss for step in range(UPDATES)])
        found.append(parameters(strategy, policy))
    losses, weights, wanted_losses, wanted_weights = found
    assert_close(losses, wanted_losses, atol=1e-3, rtol=0)
    for name, value in wanted_weights.items():
        assert_close(weights[name], value, atol=1e-3, rtol=0)


if __name__ == "__main__":
    history = alone()
    check_muon_on_replicas()
    for place, (case, (name, settings)) in enumerate(CASES.items()):
        try:
            check(name, settings, history, Path(sys.argv[1]) / str(place))
        except Exception as error:
            raise AssertionError(case) from error
    strategy = make("ddp")
    strategy.close()
    sys.stdout.write("all checked\n")
