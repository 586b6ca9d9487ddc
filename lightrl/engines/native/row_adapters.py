"""The adapter of each row of a forward, and how layers handle rows with different adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrl.engines.weights.adapters import Factors

NO_ADAPTER = -1  # stands for an adapter's number, which is its index in the engine


class MixedRows:
    """The adapters of rows that do not all have the same."""

    def __init__(self, adapters: NDArray[np.int64], device: torch.device) -> None:
        """Takes the number of each row's adapter, [n]."""
        self._adapters = adapters
        self._by_row = torch.from_numpy(adapters).to(device)
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def adapter_of(self, row: int) -> int:
        """Returns the number of a row's adapter."""
        return int(self._adapters[row])

    def by_adapter(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the number and the rows of each adapter in use."""
        for number in np.unique(self._adapters).tolist():
            yield number, torch.nonzero(self._by_row == number, as_tuple=True)[0]

    def not_theirs(self, widths: tuple[int, ...]) -> Tensor:
        """Returns a mask [n, sum of widths] that is True where a column belongs to another row's adapter.

        widths: the number of columns of each adapter, side by side. Layers with equal widths share a mask.
        """
        mask = self._masks.get(widths)
        if mask is None:
            owners = torch.from_numpy(np.repeat(np.arange(len(widths)), widths)).to(self._by_row.device)
            mask = self._masks[widths] = self._by_row[:, None] != owners
        return mask

    def add(self, outputs: Tensor, inputs: Tensor, factors: Mapping[int, Factors]) -> Tensor:
        """Adds the output of each row's adapter for inputs [n, ..., in] to outputs [n, ..., out], in place."""
        if outputs.shape[0] != len(self._adapters):
            raise RuntimeError(
                f"A layer with adapters was given {outputs.shape[0]} rows where {len(self._adapters)} samples decode, "
                "so that nobody knows whose they are. Let requests of one adapter run at a time."
            )
        for adapter, pair in factors.items():
            (rows,) = torch.nonzero(self._by_row == adapter, as_tuple=True)
            if len(rows):
                outputs.index_add_(0, rows, adapted(inputs[rows], pair))
        return outputs


Rows = int | MixedRows  # one adapter for all rows, or several


class ChosenAdapters:
    """Tells every layer during a forward which adapter its rows use, all the same one or each its own."""

    def __init__(self) -> None:
        self.rows: Rows = 0


def adapted(inputs: Tensor, factors: Factors) -> Tensor:
    """Returns the term that an adapter adds to the output of a layer."""
    return torch.nn.functional.linear(torch.nn.functional.linear(inputs, factors.down), factors.up)


def rows_of(adapters: Sequence[int], device: torch.device) -> Rows:
    """Returns the adapters of rows in the form that layers take, from the number of each row's adapter."""
    first = adapters[0]
    if all(adapter == first for adapter in adapters):
        return first
    return MixedRows(np.array(adapters, np.int64), device)
