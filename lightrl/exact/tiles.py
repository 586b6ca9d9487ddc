"""Tiles: the pieces in which a step is computed, whatever the number of ranks and the micro-batch size.

The samples of an update, sorted by key, are cut into runs of up to --exact_tile_tokens. The cut depends only on the
samples. A tile is one micro-batch, whichever rank runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lightrl.data.packing import Key, dummy_batch, pack
from lightrl.metrics import Statistics
from lightrl.records import Experience, PackedBatch
from lightrl.trainers.policy_step import Batch, PolicyUpdates
from lightrl.trainers.run import RunContext


def cut_tiles(lengths: Sequence[tuple[Key, int]], max_tokens: int) -> list[list[Key]]:
    """Cuts samples, given as keys with numbers of tokens, into tiles; an overlong sample is a tile of its own."""
    tiles: list[list[Key]] = []
    room = 0
    for key, num_tokens in sorted(lengths):
        if num_tokens > room:
            tiles.append([])
            room = max_tokens
        tiles[-1].append(key)
        room -= num_tokens
    return tiles


def deal_tiles(loads: Sequence[int], world: int) -> list[int]:
    """Assigns tiles to ranks: the largest first, each to the rank with the fewest tokens so far."""
    ranks, tokens = [0] * len(loads), [0] * world
    for index in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        ranks[index] = tokens.index(min(tokens))
        tokens[ranks[index]] += loads[index]
    return ranks


class TiledUpdates(PolicyUpdates):
    """Moves whole tiles between ranks, and makes each a micro-batch, both for updates and for scores."""

    def __init__(self, run: RunContext, statistics: Statistics) -> None:
        super().__init__(run, statistics)
        self._tile_of: dict[Key, Key] = {}  # sample -> first sample of its tile

    def deal(self, experience: list[Experience], step: int) -> Batch:
        """Returns this rank's tiles of each update of an epoch, with about as many tokens as on other ranks."""
        self._tile_of = {}
        batch = super().deal(experience, step)
        if self._strategy.comm.world > 1:
            return batch
        return batch._replace(minibatches=[self._balanced(part) for part in batch.minibatches])

    def _balanced(self, mine: list[Experience]) -> list[Experience]:
        """Cuts the samples of all ranks into tiles, and moves them to the ranks of their tiles."""
        comm = self._strategy.comm
        parts = comm.all_gather_object([(item.key, item.num_tokens) for item in mine])
        lengths = dict(pair for part in parts for pair in part)
        tiles = cut_tiles(list(lengths.items()), self._config.exact_tile_tokens)
        ranks = deal_tiles([sum(lengths[key] for key in tile) for tile in tiles], comm.world)
        rank_of = {key: rank for tile, rank in zip(tiles, ranks, strict=True) for key in tile}
        self._tile_of |= {key: tile[0] for tile in tiles for key in tile}
        outgoing: list[list[Experience]] = [[] for _ in range(comm.world)]
        for item in mine:
            outgoing[rank_of[item.key]].append(item)
        return sorted(comm.exchange(outgoing), key=lambda item: item.key)

    def micro_batches(self, experience: list[Experience], **per_token: Any) -> list[PackedBatch]:
        """Packs each tile, and adds dummies until all ranks have the same number."""
        temperature, comm = self._config.temperature, self._strategy.comm
        with comm.phase("packing", local=True) as agreed:
            ordered = sorted(experience, key=lambda item: item.key)
            tiles = groupby(ordered, key=lambda item: self._tile_of[item.key])
            packs = [pack(list(tile), temperature=temperature, encode=None, **per_token) for _, tile in tiles]
            agreed.largest = max(1, len(packs))
        return packs + [dummy_batch(temperature=temperature)] * (agreed.largest - len(packs))
