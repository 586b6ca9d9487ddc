"""Trains the tiny policy by tiles and prints the hash of its weights, a line for each case.

STRATEGIES [broken]: the strategies to train under, joined by commas. `broken` also trains once more without each
safeguard, on two spreads of the same samples.
"""

import hashlib
import sys
from unittest import mock

import torch

from lightrl.config import GRPOConfig
from lightrl.exact.environment import fix_arithmetic
from lightrl.exact.strategy import exact_strategy
from lightrl.exact.tiles import cut_tiles, deal_tiles
from lightrl.testing.tiny_training import fresh, loss_fn, make_batch, num_tokens, parameters, samples

STEPS, COUNT, TILE = 2, 24, 40


class PlainSum:
    """What autograd does without the safeguard: gradients are added in the order in which they come."""

    def __init__(self, num_elements):
        self.sum, self.is_empty = torch.zeros(num_elements), True

    def add(self, gradient):
        self.sum = gradient.clone() if self.is_empty else self.sum + gradient
        self.is_empty = False

    def total(self):
        self.is_empty = True
        return self.sum


def trained(strategy, *, backwards=False, max_tokens=TILE, by_arrival=False):
    """Returns the hash after STEPS updates; backwards: samples and tiles come in the other order."""
    policy, _ = fresh(strategy)
    for step in range(STEPS):
        items = samples(step, COUNT)[:: -1 if backwards else 1]
        names = {(index, 0) if by_arrival else item.key: item for index, item in enumerate(items)}
        tiles = cut_tiles([(name, item.num_tokens) for name, item in names.items()], max_tokens)
        ranks = deal_tiles([sum(names[name].num_tokens for name in tile) for tile in tiles], strategy.comm.world)
        mine = [tile for tile, rank in zip(tiles, ranks, strict=True) if rank == strategy.comm.rank]
        packs = [make_batch([names[name] for name in tile]) for tile in mine[:: -1 if backwards else 1]]
        result = strategy.train_batch(packs or [make_batch([])], loss_fn, num_tokens, model=policy)
        assert not result.skipped
    digest = hashlib.sha256(f"{result.loss} {result.grad_norm}".encode())
    for _, tensor in sorted(parameters(strategy, policy).items()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def main():
    fix_arithmetic()
    torch.manual_seed(0)
    for name in sys.argv[1].split(","):
        strategy = exact_strategy(GRPOConfig(exact=True, strategy=name))
        strategy.setup_distributed()
        for backwards in (False, True):
            say(strategy, f"{name} {backwards}", trained(strategy, backwards=backwards))
    if "broken" in sys.argv:
        with mock.patch("lightrl.exact.strategy.GradientSum", PlainSum):
            say(strategy, "rounding False", trained(strategy))
            say(strategy, "rounding True", trained(strategy, backwards=True))
        say(strategy, "order False", trained(strategy, by_arrival=True))
        say(strategy, "order True", trained(strategy, by_arrival=True, backwards=True))
        say(strategy, "tile False", trained(strategy, max_tokens=12))
        say(strategy, "tile True", trained(strategy, max_tokens=90))
    strategy.close()


def say(strategy, case, digest):
    if strategy.comm.is_main:
        print(f"CASE {case} {digest}", flush=True)


if __name__ == "__main__":
    main()
