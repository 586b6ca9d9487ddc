"""Keys and values of all running samples: one row per sample, whose position j holds the sample's position j.

Rows are left-aligned, so a model's own mask rules (causal, sliding, chunked) apply to the cache as they stand.
Transformers sees it as a `Cache`; the effect of `update` depends on the phase that was begun before the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from lightrl.engines.native.row_parts import RowPart

_LINE = 16  # fp32 positions per cache line
_STEP = 2 * _LINE  # storage grows in multiples of this
_NAMES = ("cache", "past_key_values", "cache_params")  # transformers 5.24 has the first, and until 5.40 the others too
_STEP_READ = 8  # decoding reads in multiples of this: larger ones waste memory bandwidth, its bottleneck


def round_up(value: int, multiple: int = _STEP) -> int:
    """Returns the smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


def cache_name(forward: Callable[..., Any]) -> str:
    """Returns the name of the argument in which the forward of a transformers model takes its cache."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in _NAMES if name in parameters), _NAMES[0])


@dataclass(slots=True)
class LayerStorage:
    """Keys and values of one attention layer; with latent attention, the two have different head sizes."""

    keys: Tensor  # [rows, kv_heads, capacity, key_dim], a view of storage with adjacent positions
    values: Tensor  # [rows, kv_heads, capacity, value_dim]

    @classmethod
    def zeros(cls, keys: Tensor, values: Tensor, rows: int, capacity: int) -> LayerStorage:
        """Makes storage for keys and values like these [_, heads, _, dim].

        Zeros, not empty: a masked position still enters "weight 0 times value", and 0 * NaN is NaN. Keys are stored as
        [rows, heads, dim, capacity]: a query of one token is then multiplied with rows of consecutive positions, which
        takes half the time of a product with short rows.
        """
        num_heads, key_dim = keys.shape[1], keys.shape[3]
        return cls(
            keys.new_zeros(rows, num_heads, key_dim, capacity).transpose(2, 3),
            values.new_zeros(rows, num_heads, capacity, values.shape[3]),
        )

    def resized(self, rows: int, capacity: int) -> LayerStorage:
        """Returns storage of another size with the same content."""
        grown = LayerStorage.zeros(self.keys, self.values, rows, capacity)
        kept_rows, kept = min(rows, self.keys.shape[0]), min(capacity, self.keys.shape[2])
        grown.keys[:kept_rows, :, :kept] = self.keys[:kept_rows, :, :kept]
        grown.values[:kept_rows, :, :kept] = self.values[:kept_rows, :, :kept]
        return grown

    def num_bytes(self) -> int:
        """Returns the bytes of keys and values."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def free(self) -> int:
        """Frees the memory, even if a traceback or a captured graph still holds a view; returns its bytes."""
        num_bytes = self.num_bytes()
        self.keys.untyped_storage().resize_(0)
        self.values.untyped_storage().resize_(0)
        return num_bytes


@dataclass(slots=True)
class Decode:
    """Decoding of one token per row: rows 0 .. n - 1 write at their position and read the first num_read ones."""

    rows: Tensor  # [n] int64: 0 to n - 1
    positions: Tensor  # [n] int64
    num_read: int
    shared_position: int | None  # the position of all rows, if equal
    parts: tuple[ReadPart, ...]

    def mask(self, window: int | None, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
        """Returns the additive mask [rows * kv_heads or 1, 1, num_read] of layers with this sliding window."""
        positions, heads = (self.positions, num_kv_heads) if self.shared_position is None else (self.positions[:1], 1)
        by_row = additive_mask(positions[:, None, None], self.num_read, window, dtype)
        return by_row.expand(-1, heads, -1, -1).flatten(0, 1)


def additive_mask(positions: Tensor, num_read: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Returns [*positions.shape, num_read]: 0 where a query at the position may look, else -inf."""
    keys, queries = torch.arange(num_read, device=positions.device), positions[..., None]
    is_hidden = keys > queries if window is None else (keys > queries) | (keys <= queries - window)
    return torch.where(is_hidden, float("-inf"), 0.0).to(dtype)


@dataclass(frozen=True, slots=True)
class ReadPart:
    """Rows that are read together, up to a common position."""

    rows: slice
    num_read: int


@dataclass(frozen=True, slots=True)
class _Views:
    """Views for a layer's decode steps, kept between steps because making a view costs as much as a small sum."""

    keys: Tensor  # [n * kv_heads, dim, num_read]
    values: Tensor  # [n * kv_heads, num_read, dim]
    keys_by_position: Tensor  # [num_read, n, kv_heads, dim]
    values_by_position: Tensor


class RowCache(Cache):
    """Row storage for every layer, made at the layer's first prefill and grown in rounded steps."""

    least_read = _STEP_READ  # least number of positions that decoding reads

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.storage: list[LayerStorage | None] = []
        self.num_rows = 0
        self.capacity = 0
        self.decode_phase = Decode(torch.empty(0), torch.empty(0), 0, None, ())  # the phase that was begun last
        self._prefill: tuple[slice | Tensor, Tensor] | None = None  # rows and the prompt of each; None while decoding
        self._views: dict[tuple[int, int], _Views] = {}  # by layer and part; valid while the same parts are read

    def reserve(self, rows: int, positions: int, most_rows: int, most_positions: int) -> None:
        """Grows to hold rows x positions, by at least half, so that a long answer does not copy at every step."""
        if rows <= self.num_rows and positions <= self.capacity:
            return
        rows = self.num_rows if rows <= self.num_rows else min(most_rows, max(rows, self.num_rows * 3 // 2))
        wanted = min(most_positions, max(positions, self.capacity * 3 // 2))
        # An odd number of lines: an even number maps adjacent rows to the same few sets of a processor's cache.
        positions = self.capacity if positions <= self.capacity else round_up(wanted - _LINE) + _LINE
        self._views.clear()
        for index, layer in enumerate(self.storage):  # one by one: both sizes of all layers might not fit into a device
            self.storage[index] = layer and layer.resized(rows, positions)
        self.num_rows, self.capacity = rows, positions  # last: after an error, the next call resizes every layer

    def begin_prefill(self, target_rows: Tensor, source_prompts: Tensor) -> None:
        """Makes update() store prompts: prompt source_prompts[j] in row target_rows[j]; both [m] int64."""
        is_run = target_rows.device.type == "cpu" and bool((target_rows.diff() == 1).all())
        # Adjacent rows are written in a tenth of the time.
        self._prefill = slice(int(target_rows[0]), int(target_rows[-1]) + 1) if is_run else target_rows, source_prompts

    def begin_decode(
        self, positions: Tensor, lowest_position: int, highest_position: int, parts: Sequence[RowPart] = ()
    ) -> None:
        """Makes update() and append() store one token per row at these positions; parts: the rows for read()."""
        num_read = self._num_read(highest_position)
        shared = highest_position if lowest_position == highest_position and not parts else None
        read = tuple(ReadPart(slice(part.start, part.stop), self._num_read(part.highest)) for part in parts)
        read = read or (ReadPart(slice(0, len(positions)), num_read),)
        phase = Decode(torch.arange(len(positions), device=positions.device), positions, num_read, shared, read)
        if self.decode_phase.parts != phase.parts:
            self._views.clear()
        self.decode_phase, self._prefill = phase, None

    def _num_read(self, highest_position: int) -> int:
        return min(max(self.least_read, round_up(highest_position + 1, _STEP_READ)), self.capacity)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values [b, kv_heads, t, dim]; returns those that the queries attend to."""
        if self._prefill is not None:
            self.store_prompts(key_states, value_states, layer_idx)
            return key_states, value_states
        self.append(key_states[:, :, 0], value_states[:, :, 0], layer_idx)
        phase, layer = self.decode_phase, self.layer(layer_idx)
        read = (slice(len(phase.positions)), slice(None), slice(phase.num_read))
        return layer.keys[read], layer.values[read]

    def store_prompts(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Stores keys and values [prompts, kv_heads, t, dim] in the rows of the prefill phase."""
        assert self._prefill is not None
        self.storage.extend([None] * (layer_idx + 1 - len(self.storage)))
        layer = self.storage[layer_idx] or LayerStorage.zeros(keys, values, self.num_rows, self.capacity)
        self.storage[layer_idx] = layer
        (rows, sources), length = self._prefill, keys.shape[2]
        # Brought into the storage's layout first, so that the copy for each sample is one block.
        layer.keys.transpose(2, 3)[rows, ..., :length] = keys.transpose(2, 3).contiguous().index_select(0, sources)
        layer.values[rows, :, :length] = values.contiguous().index_select(0, sources)

    def append(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Stores the key and the value of one token per row, [n, kv_heads, dim] each."""
        phase, layer = self.decode_phase, self.layer(layer_idx)
        if phase.shared_position is not None:  # plain copies take half the time of indexed ones
            views = self._views_of(layer_idx, 0)  # rows at the same position are one part
            views.keys_by_position[phase.shared_position] = keys
            views.values_by_position[phase.shared_position] = values
            return
        layer.keys[phase.rows, :, phase.positions] = keys
        layer.values[phase.rows, :, phase.positions] = values

    def read(self, layer_idx: int, part: int = 0) -> tuple[Tensor, Tensor]:
        """Returns views for a step over a part's rows, n kv heads in all: keys [n, dim, num_read] and values."""
        views = self._views_of(layer_idx, part)
        return views.keys, views.values

    def _views_of(self, layer_idx: int, part: int) -> _Views:
        if (views := self._views.get((layer_idx, part))) is None:
            chosen, layer = self.decode_phase.parts[part], self.layer(layer_idx)
            keys, values = (whole[chosen.rows, :, : chosen.num_read] for whole in (layer.keys, layer.values))
            views = self._views[layer_idx, part] = _Views(
                keys=keys.transpose(2, 3).flatten(0, 1),
                values=values.flatten(0, 1),
                keys_by_position=keys.movedim(2, 0),
                values_by_position=values.movedim(2, 0),
            )
        return views

    def layer(self, layer_idx: int) -> LayerStorage:
        """Returns the storage of a layer that has seen a prefill."""
        layer = self.storage[layer_idx]
        assert layer is not None, f"layer {layer_idx} decodes before its first prefill"
        return layer

    def move_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first positions of rows to other rows; all are read before any is written."""
        for layer in filter(None, self.storage):
            layer.keys[targets, :, :length] = layer.keys[sources, :, :length]
            layer.values[targets, :, :length] = layer.values[sources, :, :length]

    def read_row(self, row: int, length: int) -> list[LayerStorage | None]:
        """Returns a copy of the first positions of one row."""
        return [
            layer
            and LayerStorage(layer.keys[row : row + 1, :, :length].clone(), layer.values[row, None, :, :length].clone())
            for layer in self.storage
        ]

    def write_rows(self, rows: slice, content: list[LayerStorage | None], length: int) -> None:
        """Writes the result of read_row into each of the rows."""
        for layer, copy in zip(self.storage, content, strict=True):
            if layer is not None and copy is not None:
                layer.keys[rows, :, :length] = copy.keys
                layer.values[rows, :, :length] = copy.values

    def read_tokens(self, rows: Tensor, positions: Tensor) -> list[LayerStorage | None]:
        """Returns a copy of one position of each of the rows."""
        return [
            layer and LayerStorage(layer.keys[rows, :, positions], layer.values[rows, :, positions])
            for layer in self.storage
        ]

    def write_tokens(self, rows: Tensor, positions: Tensor, content: list[LayerStorage | None]) -> None:
        """Writes back the result of read_tokens."""
        for layer, copy in zip(self.storage, content, strict=True):
            if layer is not None and copy is not None:
                layer.keys[rows, :, positions] = copy.keys
                layer.values[rows, :, positions] = copy.values

    def free(self) -> int:
        """Frees the storage; returns its bytes."""
        num_bytes = sum(layer.free() for layer in self.storage if layer is not None)
        self.storage, self.num_rows, self.capacity = [], 0, 0
        self._views.clear()
        return num_bytes

    # What transformers calls on a cache, mostly to build masks. Its masks take one query offset for all rows; ours has
    # one per row, as native_mask (modules.py) expects. This can go when q_offset is a tensor of rows upstream:
    # https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/masking_utils.py (5.19: not yet)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns the number of positions that the queries attend to, and the first of them."""
        return (self.decode_phase.num_read if self._prefill is None else query_length), 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of positions before the token that is decoded."""
        return self.decode_phase.num_read - 1 if self._prefill is None else 0

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]
        """Returns one offset per row while decoding."""
        return self.decode_phase.positions if self._prefill is None else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1, as there is no fixed length."""
        return -1
