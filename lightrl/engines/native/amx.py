"""Products of a few rows with bfloat16 weights by the tile instructions of x86 processors (AMX).

oneDNN has them too, but takes longer to start a small product than to compute it, and reads large weights more slowly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lightrl.c_library import compiled
from lightrl.engines.native.products import PackedWeight

_SOURCE = Path(__file__).with_suffix(".c")
_SIDE = 16  # rows or outputs of a tile
_DEPTH = 32  # inputs of a tile
_OUTPUTS = 32  # outputs that are computed together
_MOST_ROWS = 512  # more are the rows of prompts, whose products oneDNN does well

_long, _pointer = ctypes.c_long, ctypes.c_void_p


class TileWeight(PackedWeight):
    """A weight as tiles, which the first product after drop() makes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._multiply = library.product
        self._multiply.argtypes = (_long, _long, _long, *[_pointer] * 6, ctypes.c_int)
        self._multiply.restype = None

    def product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Returns inputs @ weight.T + bias for a weight [out, in]; None if tiles do not fit them."""
        out = inputs.new_empty(len(inputs), len(weight))
        return out if self._write(out, inputs, weight, bias=bias) else None

    def add_product(self, hidden: Tensor, inputs: Tensor, weight: Tensor) -> bool:
        """Adds inputs @ weight.T to hidden states in place; returns False if tiles do not fit them."""
        return hidden.is_contiguous() and self._write(hidden, inputs, weight, added=hidden)

    def _write(
        self, out: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
    ) -> bool:
        if not self._is_current:
            self._packed, self._is_current = as_tiles(weight), True
        rows, num_inputs = inputs.shape
        if self._packed is None or rows > _MOST_ROWS or not inputs.is_contiguous():
            return False
        tiles = inputs.new_empty(-(-rows // _SIDE) * _SIDE * num_inputs)
        self._multiply(
            rows,
            num_inputs // _DEPTH,
            len(weight),
            inputs.data_ptr(),
            self._packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if added is None else added.data_ptr(),
            tiles.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return True


@torch.no_grad()
def as_tiles(weight: Tensor) -> Tensor | None:
    """Returns a copy [out / 16, in / 32, 16, 16, 2] of a weight [out, in], in which a pair of inputs is last.

    Outputs are filled up with zeros to a multiple of 32. None if the number of inputs is not one.
    """
    outputs, inputs = weight.shape
    if inputs % _DEPTH:
        return None
    whole = F.pad(weight, (0, 0, 0, -outputs % _OUTPUTS))
    return whole.view(-1, _SIDE, inputs // _DEPTH, _DEPTH // 2, 2).permute(0, 2, 3, 1, 4).contiguous()


def make_tiles(weight: Tensor) -> Callable[[], TileWeight] | None:
    """Returns the constructor of packed weights of this type; None if this machine has no tiles for it."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not torch.cpu._is_amx_tile_supported():
        return None
    library = compiled(_SOURCE, {})
    return partial(TileWeight, library) if library.can_multiply() else None
