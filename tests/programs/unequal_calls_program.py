"""Checks on 2 ranks that loops by calls may give one rank more work: 3 micro-batches, and 1 on the other rank."""

import sys

import torch
from torch.testing import assert_close

from lightrl.config import DeepSpeedConfig, StrategyOptions
from lightrl.strategy import strategy_class
from lightrl.testing.tiny_training import parameters

CALLS = (3, 1)  # of each rank
SIZES = (1, 2, 3, 4)  # rows of each micro-batch; the last is rank 1's


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def make(name, **settings):
    strategy = strategy_class(name)(0, 0.0, 1, 2 * max(CALLS), StrategyOptions(**settings))
    strategy.setup_distributed()
    return strategy, *strategy.prepare((*make_model(), None))[:2]


def loss_of(model, index):
    rows = torch.arange(3.0 * SIZES[index]).view(-1, 3) / 10 + index
    return (model(rows) - index).pow(2).mean()


def one_process(shares):
    """The update with all micro-batches in plain torch: the norm and the weights."""
    model, optimizer = make_model()
    sum(loss_of(model, index) * share for index, share in enumerate(shares)).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    return float(norm), {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(strategy, model, optimizer, wanted):
    norm, weights = wanted
    step = strategy.optimizer_step(optimizer, model, None, is_boundary=True)
    assert_close(step.grad_norm, norm, atol=1e-6, rtol=1e-5)
    for name, value in parameters(strategy, model).items():
        assert_close(value, weights[name], atol=1e-6, rtol=1e-5)


def check_different_numbers(name, **settings):
    """Without a weight, the update is the mean over the 4 micro-batches; with weights, it is their sum."""
    for weights in ([None] * 4, [size / sum(SIZES) for size in SIZES]):
        strategy, model, optimizer = make(name, **settings)
        for index in (range(3), [3])[strategy.comm.rank]:
            strategy.backward(loss_of(model, index), model, optimizer, weight=weights[index])
        check(strategy, model, optimizer, one_process([weight or 1 / 4 for weight in weights]))


def check_filled_up(name, **settings):
    """A rank with less work gives the weight 0, and any micro-batch, until it has made as many calls."""
    strategy, model, optimizer = make(name, **settings)
    rank = strategy.comm.rank
    for call in range(max(CALLS)):
        weight = SIZES[3 * rank + call] / sum(SIZES) if call < CALLS[rank] else 0.0
        with strategy.before_micro_batch(model, call == max(CALLS) - 1):
            strategy.backward(loss_of(model, 3 if rank else call), model, optimizer, weight=weight)
    check(strategy, model, optimizer, one_process([size / sum(SIZES) for size in SIZES]))


if __name__ == "__main__":
    for stage in map(int, sys.argv[1:]):
        zero = {"deepspeed": DeepSpeedConfig(zero_stage=stage, param_persistence_threshold=0)}
        check_filled_up("deepspeed", **zero)
        if stage < 2:
            check_different_numbers("deepspeed", **zero)
    if len(sys.argv) == 1:
        check_filled_up("fsdp")
        check_filled_up("ddp")
        check_different_numbers("ddp")
    make("ddp")[0].close()
    print("all checked", flush=True)
