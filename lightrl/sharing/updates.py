"""Packs samples by families, the samples of one prompt, so that a family's prompt is computed once.

Ranks and micro-batches get whole families if these fit; a family that is split computes its prompt in each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lightrl.data.packing import Key, dummy_batch, pack, split_micro_batches
from lightrl.records import Experience, PackedBatch
from lightrl.sharing.families import Dealt, cut_to_fit, dealt, evenly_dealt, filled
from lightrl.sharing.tree import SharedBatch, num_computed, share
from lightrl.trainers.policy_step import PolicyUpdates


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of a prompt that stay together in a micro-batch."""

    items: tuple[Experience, ...]
    num_tokens: int  # computed tokens

    @property
    def key(self) -> Key:
        """The key of the first sample."""
        return self.items[0].key

    @property
    def label(self) -> str:
        """The subject of an error message about the family: only one with a single sample can be too long."""
        return self.items[0].label

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.items)

    def halves(self) -> list[Family]:
        """Splits the family into two, each with every other sample by length."""
        ordered = sorted(self.items, key=lambda item: (-item.num_tokens, item.key))
        return [family_of(ordered[0::2]), family_of(ordered[1::2])]

    def pieces(self, max_samples: int) -> list[Family]:
        """Splits the family into parts of up to max_samples, in the order of the samples."""
        starts = range(0, len(self.items), max_samples)
        return [family_of(self.items[start : start + max_samples]) for start in starts]


def family_of(items: Sequence[Experience]) -> Family:
    """Makes a family of samples."""
    ordered = sorted(items, key=lambda item: item.key)
    return Family(tuple(ordered), num_computed([(*s.sample.prompt_ids, *s.sample.response_ids) for s in ordered]))


def families(items: Sequence[Experience], *, max_tokens: int | None = None) -> list[Family]:
    """Returns the samples of each position as families, halved until each part fits or is a single sample."""
    ordered = sorted(items, key=lambda item: item.key)
    whole = [family_of(list(same)) for _, same in groupby(ordered, key=lambda item: item.sample.position)]
    return cut_to_fit(whole, max_tokens)


def by_samples(items: Sequence[Experience], max_samples: int) -> list[list[Experience]]:
    """Returns micro-batches of up to max_samples, keeping as many samples of a family together as fit."""
    return [[item for piece in part for item in piece.items] for part in filled(families(items), max_samples)]


class SharedUpdates(PolicyUpdates):
    """Mixin for a class of updates whose models score trees of samples instead of rows."""

    def _balanced(self, mine: list[Experience]) -> list[Experience]:
        """Moves whole families between ranks, by their computed tokens; moves halves if that is uneven."""
        comm = self._strategy.comm
        parts, best = evenly_dealt(families(mine), self._dealt, comm.world)
        if best.targets:
            self._statistics.maximum("balance/max_over_mean", best.imbalance)
        outgoing: list[list[Experience]] = [[] for _ in range(comm.world)]
        for part, target in zip(parts, best.of_rank(comm.rank), strict=True):
            outgoing[target] += part.items
        return comm.exchange(outgoing)

    def _dealt(self, mine: list[Family]) -> Dealt:
        """Assigns the families of all ranks; a collective."""
        return dealt(self._strategy.comm.all_gather_object([family.num_tokens for family in mine]))

    def micro_batches(self, experience: list[Experience], **per_token: Any) -> list[PackedBatch]:
        """Packs families into micro-batches, the same number on every rank; dummies fill up."""
        comm, temperature, encode = self._strategy.comm, self._config.temperature, self._encoder
        with comm.phase("micro-batches", local=True) as agreed:
            parts = self._parts(experience)
            agreed.largest = max(1, len(parts))
        if len(parts) < agreed.largest:
            parts = self._parts(experience, agreed.largest)
        with comm.phase("packing", local=True):
            packs = [share(pack(part, temperature=temperature, encode=encode, **per_token)) for part in parts if part]
            for batch in packs:
                computed = len(batch.tree.kept) if isinstance(batch, SharedBatch) else batch.cu_seqlens[-1]
                self._statistics.mean("tokens/computed_share", computed, batch.cu_seqlens[-1])
        return packs + [dummy_batch(temperature=temperature)] * (agreed.largest - len(packs))

    def _parts(self, experience: list[Experience], count: int = 1) -> list[list[Experience]]:
        if self._config.micro_batch_size:
            return by_samples(experience, self._config.micro_batch_size)
        limit = self._config.max_tokens_per_microbatch
        groups = families(experience, max_tokens=limit)
        batches = split_micro_batches(groups, max_tokens=limit, max_samples=None, min_num=count)
        return [[item for family in batch for item in family.items] for batch in batches]
