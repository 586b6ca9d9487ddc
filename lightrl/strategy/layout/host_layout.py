"""HostLayout: shards that the ranks of one host gather by writing them into memory that all of them map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrl.engines.base import NamedTensors
from lightrl.engines.native.engine import copy_weight
from lightrl.engines.weights.fingerprint import Fingerprint, Sums
from lightrl.strategy.layout.dtensor import DTensorLayout, Sharding, sharding_of, span_of_shard
from lightrl.strategy.layout.plain import Share


@dataclass(slots=True)
class CommonMemory:
    """Whole tensors in memory that all ranks map, and what the ranks have written there together."""

    places: Mapping[str, Tensor]  # by name
    written: set[str] = field(default_factory=set)
    found: Mapping[str, Fingerprint] = field(default_factory=dict)  # of what was written, read where it is now


class HostLayout(DTensorLayout):
    """A DTensorLayout that exchanges nothing where it is given common memory."""

    memory: CommonMemory | None = None  # while a sync writes there

    @contextmanager
    def writing_to(self, places: Mapping[str, Tensor]) -> Iterator[CommonMemory]:
        """Gathers into these places in the body of the context; when it begins, no rank may still read them."""
        self.memory = CommonMemory(places)
        try:
            yield self.memory
        finally:
            self.memory = None

    def gather_named(self, named: NamedTensors, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor), those in common memory first; every rank must iterate to the end."""
        memory = self.memory
        if memory is not None:
            named = self._write(memory, named, dtype)
            yield from ((name, memory.places[name]) for name in sorted(memory.written))
        yield from super().gather_named(named, dtype)

    def _write(self, memory: CommonMemory, named: NamedTensors, dtype: torch.dtype | None) -> list[tuple[str, Tensor]]:
        """Writes this rank's rows, and reads what is there then; returns what has no place in common memory."""
        others, shares, sums = [], [], Sums()
        taken = set[int]()  # an engine may tie what the trainer does not: both are loaded then, which shows it
        for name, tensor in named:
            place, rows = memory.places.get(name), _rows_of_shards(tensor)
            if place is None or rows is None or place.data_ptr() in taken or not _fits(place, tensor, dtype):
                others.append((name, tensor))
                continue
            taken.add(place.data_ptr())
            own, is_first = rows.cut(place), self.is_first_holder(tensor)
            if is_first:
                copy_weight(own, self.shard(tensor))
            sums.add(own, span_of_shard(rows, place.shape))
            shares.append(Share(name, place.numel(), is_first))
        memory.written.update(share.name for share in shares)
        # This collective also waits until every rank has written.
        memory.found = self.summed(shares, sums.totals()) if shares else {}
        return others


def _rows_of_shards(tensor: Tensor) -> Sharding | None:
    """Returns how a tensor is cut, if that is into rows only."""
    sharding = sharding_of(tensor) if isinstance(tensor, DTensor) else None
    return sharding if sharding is not None and sharding.num_parts == 1 else None


def _fits(place: Tensor, tensor: Tensor, dtype: torch.dtype | None) -> bool:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return (place.shape, place.dtype) == (tensor.shape, wanted)
