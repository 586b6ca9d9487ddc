"""Takes one update of the tiny model from packs of given samples, whatever the number of ranks; writes its weights.

usage: rounding_program.py FOLDER [options of a strategy]
"""

import sys
from pathlib import Path

import torch

from lightrl.config import GRPOConfig, parse_config
from lightrl.strategy import create_strategy
from lightrl.testing.tiny_training import loss_fn, make_batch, num_tokens, parameters, samples, tiny_policy, trainable


def update(strategy, pack_size):
    """Returns the change of every weight: the gradient, since the rate of SGD is 1."""
    everything = samples(0, count=24)
    packs = [everything[first : first + pack_size] for first in range(0, len(everything), pack_size)]
    policy = strategy.prepare_model(tiny_policy())
    before = parameters(strategy, policy)
    strategy.trained.entries.clear()
    strategy.register(policy, torch.optim.SGD(trainable(policy), lr=1.0))
    strategy.max_norm = 0.0
    mine = [make_batch(pack) for pack in packs[strategy.comm.rank :: strategy.comm.world]]
    strategy.train_batch(mine, loss_fn, num_tokens, model=policy)
    after = parameters(strategy, policy)
    return torch.cat([(after[name].double() - before[name].double()).reshape(-1) for name in sorted(after)])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    config = parse_config(GRPOConfig, [*sys.argv[2:], "--dtype", "bfloat16", "--distributed.device", "cpu"])
    strategy = create_strategy(config)
    strategy.setup_distributed()
    found = {size: update(strategy, size) for size in (3, 6)}
    if strategy.comm.is_main:
        torch.save(found, folder / f"{strategy.comm.world}.pt")
    strategy.close()
