"""The keys and values of every running sequence: one row a sequence, and place j of a row holds its position j.

Rows are left-aligned, so the place of a key is its position: a model's own mask rules (causal, sliding, chunked) apply
to places as they stand. Transformers sees the cache as a `Cache`; what `update` does depends on the phase set before
the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

_LINE = 16  # places of fp32 in a cache line
_PLACES = 2 * _LINE  # storage grows in multiples of this
_PLACES_READ = 8  # decoding reads in multiples of this: a larger one wastes memory bandwidth, which is what bounds it


def round_up(value: int, multiple: int = _PLACES) -> int:
    """The least multiple that holds the value."""
    return -(-value // multiple) * multiple


@dataclass(slots=True)
class LayerStorage:
    """One attention layer. Latent-attention models have keys and values of different head sizes."""

    keys: Tensor  # [rows, kv_heads, capacity, key_dim], a view of storage whose places lie side by side
    values: Tensor  # [rows, kv_heads, capacity, value_dim]

    def resized(self, rows: int, capacity: int) -> LayerStorage:
        num_heads, key_dim, value_dim = self.keys.shape[1], self.keys.shape[3], self.values.shape[3]
        # Zeros, not empty: a masked place still enters "weight 0 times value", and 0 * NaN is NaN.
        grown = LayerStorage(
            new_key_storage(self.keys, rows, num_heads, capacity, key_dim),
            self.values.new_zeros(rows, num_heads, capacity, value_dim),
        )
        kept_rows, kept_places = min(rows, self.keys.shape[0]), min(capacity, self.keys.shape[2])
        grown.keys[:kept_rows, :, :kept_places] = self.keys[:kept_rows, :, :kept_places]
        grown.values[:kept_rows, :, :kept_places] = self.values[:kept_rows, :, :kept_places]
        return grown

    def num_bytes(self) -> int:
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def free(self) -> None:
        # Whoever still holds a view (a traceback, a captured graph) must not keep the memory alive.
        self.keys.untyped_storage().resize_(0)
        self.values.untyped_storage().resize_(0)


def new_key_storage(like: Tensor, rows: int, num_heads: int, capacity: int, key_dim: int) -> Tensor:
    """Zeros [rows, heads, capacity, dim] stored as [rows, heads, dim, capacity].

    A query of one token then meets rows of consecutive places, which takes half the time of a product with short rows.
    """
    return like.new_zeros(rows, num_heads, key_dim, capacity).transpose(2, 3)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts enter: row target_rows[j] receives the keys and values of prompt source_prompts[j]."""

    target_rows: Tensor  # [m] int64
    source_prompts: Tensor  # [m] int64


@dataclass(slots=True)
class Decode:
    """One token a row: rows 0 .. len(positions) - 1 write at their position and read num_places places."""

    positions: Tensor  # [n] int64
    num_places: int
    shared_place: int | None  # the position of every row, if it is one

    def reads_as(self, other: object) -> bool:
        """Whether the other phase reads the same places of as many rows."""
        if not isinstance(other, Decode) or self.num_places != other.num_places:
            return False
        return self.positions.shape == other.positions.shape


@dataclass(frozen=True, slots=True)
class _Views:
    """What a layer's decode step reads and writes, kept over the steps: making views costs as much as small sums."""

    keys: Tensor  # [n * kv_heads, dim, num_places]
    values: Tensor  # [n * kv_heads, num_places, dim]
    keys_by_place: Tensor  # [num_places, n, kv_heads, dim]
    values_by_place: Tensor


class SlotCache(Cache):
    """Row storage for every layer, made at the layer's first prefill and grown in rounded steps."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.storage: list[LayerStorage | None] = []
        self.num_rows = 0
        self.capacity = 0
        self._phase: Prefill | Decode | None = None
        self._write_index: dict[int, Tensor] = {}  # by lines a row; valid for one decode step
        self._views: dict[int, _Views] = {}  # by layer; valid while the same places of as many rows are read

    def reserve(self, rows: int, places: int, most_rows: int, most_places: int) -> None:
        """Holds at least rows x places; grows by half at least, so that a long answer does not copy at every step."""
        if rows <= self.num_rows and places <= self.capacity:
            return
        if rows > self.num_rows:
            self.num_rows = min(most_rows, max(rows, self.num_rows * 3 // 2))
        if places > self.capacity:
            wanted = min(most_places, max(places, self.capacity * 3 // 2))
            # An odd number of lines: an even one maps neighbouring rows to the same few sets of a processor's cache.
            self.capacity = round_up(wanted - _LINE) + _LINE
        self._views.clear()
        for index, layer in enumerate(self.storage):
            if layer is not None:
                self.storage[index] = layer.resized(self.num_rows, self.capacity)

    def begin_prefill(self, target_rows: Tensor, source_prompts: Tensor) -> None:
        self._phase = Prefill(target_rows, source_prompts)

    def begin_decode(self, positions: Tensor, lowest_position: int, highest_position: int) -> None:
        places = min(round_up(highest_position + 1, _PLACES_READ), self.capacity)
        phase = Decode(positions, places, highest_position if lowest_position == highest_position else None)
        if not phase.reads_as(self._phase):
            self._views.clear()
        self._phase = phase
        self._write_index.clear()

    @property
    def decode_phase(self) -> Decode:
        assert isinstance(self._phase, Decode)
        return self._phase

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values [b, kv_heads, t, dim]; returns those that the queries may look at."""
        if isinstance(self._phase, Prefill):
            self._store_prompts(self._phase, key_states, value_states, layer_idx)
            return key_states, value_states
        self.append(key_states[:, :, 0], value_states[:, :, 0], layer_idx)
        keys, values = self.looked_at(layer_idx)
        rows = key_states.shape[:2]
        return keys.unflatten(0, rows).transpose(2, 3), values.unflatten(0, rows)

    def append(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Stores the key and the value of one token a row, [n, kv_heads, dim] each."""
        phase = self.decode_phase
        layer = self.layer(layer_idx)
        num_heads, key_dim = keys.shape[1:]
        if phase.shared_place is not None:  # plain copies take half the time of indexed ones
            views = self._views_of(layer_idx)
            views.keys_by_place[phase.shared_place] = keys
            views.values_by_place[phase.shared_place] = values
            return
        layer.keys.transpose(2, 3).put_(self._flat_index(phase, num_heads * key_dim), keys)
        index = self._flat_index(phase, num_heads)
        layer.values.view(-1, values.shape[2]).index_copy_(0, index, values.reshape(-1, values.shape[2]))

    def looked_at(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Views of the places read: keys [n * kv_heads, dim, num_places], values [n * kv_heads, num_places, dim]."""
        views = self._views_of(layer_idx)
        return views.keys, views.values

    def _views_of(self, layer_idx: int) -> _Views:
        views = self._views.get(layer_idx)
        if views is None:
            phase, layer = self.decode_phase, self.layer(layer_idx)
            keys, values = (part[: len(phase.positions), :, : phase.num_places] for part in (layer.keys, layer.values))
            views = self._views[layer_idx] = _Views(
                keys=keys.transpose(2, 3).flatten(0, 1),
                values=values.flatten(0, 1),
                keys_by_place=keys.movedim(2, 0),
                values_by_place=values.movedim(2, 0),
            )
        return views

    def layer(self, layer_idx: int) -> LayerStorage:
        found = self.storage[layer_idx]
        assert found is not None, f"layer {layer_idx} decodes before its first prefill"
        return found

    def move_rows(self, sources: Tensor, targets: Tensor, places: int) -> None:
        """Copies the first places of rows; sources and targets share no row."""
        for layer in filter(None, self.storage):
            layer.keys[targets, :, :places] = layer.keys[sources, :, :places]
            layer.values[targets, :, :places] = layer.values[sources, :, :places]

    def read_row(self, row: int, places: int) -> list[LayerStorage | None]:
        """A copy of the first places of one row."""
        return [
            layer
            and LayerStorage(layer.keys[row : row + 1, :, :places].clone(), layer.values[row, None, :, :places].clone())
            for layer in self.storage
        ]

    def write_rows(self, rows: slice, content: list[LayerStorage | None], places: int) -> None:
        """Puts what read_row gave into each of the rows."""
        for layer, copy in zip(self.storage, content, strict=True):
            if layer is not None and copy is not None:
                layer.keys[rows, :, :places] = copy.keys
                layer.values[rows, :, :places] = copy.values

    def free(self) -> int:
        """Gives the storage back; returns its bytes."""
        num_bytes = 0
        for layer in filter(None, self.storage):
            num_bytes += layer.num_bytes()
            layer.free()
        self.storage = []
        self.num_rows = self.capacity = 0
        self._phase = None
        self._write_index.clear()
        self._views.clear()
        return num_bytes

    def _store_prompts(self, phase: Prefill, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        self.storage.extend([None] * (layer_idx + 1 - len(self.storage)))
        layer = self.storage[layer_idx]
        if layer is None:
            layer = LayerStorage(
                new_key_storage(keys, self.num_rows, keys.shape[1], self.capacity, keys.shape[3]),
                values.new_zeros(self.num_rows, values.shape[1], self.capacity, values.shape[3]),
            )
            self.storage[layer_idx] = layer
        places = keys.shape[2]
        layer.keys[phase.target_rows, :, :places] = keys[phase.source_prompts]
        layer.values[phase.target_rows, :, :places] = values[phase.source_prompts]

    def _flat_index(self, phase: Decode, num_lines: int) -> Tensor:
        """Where each row's position lies in storage of num_lines lines of places a row. [n * num_lines]"""
        index = self._write_index.get(num_lines)
        if index is None:
            positions = phase.positions
            lines = torch.arange(positions.shape[0] * num_lines, device=positions.device).view(-1, num_lines)
            index = (lines * self.capacity + positions[:, None]).view(-1)
            self._write_index[num_lines] = index
        return index

    # What transformers asks of a cache, mostly to build masks.

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        places = self._phase.num_places if isinstance(self._phase, Decode) else query_length
        return places, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._phase.num_places - 1 if isinstance(self._phase, Decode) else 0

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]
        """One offset a row while decoding: the registered mask function (attention.py) knows what to do with it."""
        return self._phase.positions if isinstance(self._phase, Decode) else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1
