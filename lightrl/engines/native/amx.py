"""Products of a few rows by the tile instructions of x86 processors (AMX), which multiply bfloat16 numbers.

oneDNN has them too, but takes longer to start a small product than to compute it, and reads large weights more slowly.
float32 numbers are split into three, whose products add up to the precision of float32; with 16 to 256 rows, oneDNN and
MKL take 1.2 to 1.6 times as long. Their weights are read where they lie, so nothing is packed or kept twice.
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
from lightrl.engines.native.products import PackedWeight, is_worth_packing

_FOLDER = Path(__file__).parent
_SIDE = 16  # rows or outputs of a tile
_DEPTH = 32  # inputs of a tile
_TOGETHER = 32  # rows or outputs that are computed together
_MOST_ROWS = 512  # more are the rows of prompts, whose products oneDNN and MKL do well

_long, _pointer = ctypes.c_long, ctypes.c_void_p


class TileWeight(PackedWeight):
    """A bfloat16 weight as tiles, which the first product after drop() makes."""

    num_parts = 1  # bfloat16 numbers of an input
    fewest_rows = 1

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._multiply = library.product
        self._multiply.argtypes = (_long, _long, _long, *[_pointer] * 6, ctypes.c_int)
        self._multiply.restype = None

    def product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Returns inputs @ weight.T + bias for a weight [out, in]; None if tiles do not fit them."""
        content = self._content(weight)
        if content is None or not self._fits(inputs):
            return None
        out = inputs.new_empty(len(inputs), len(weight))
        self._write(out, inputs, content, bias=bias)
        return out

    def add_product(self, hidden: Tensor, inputs: Tensor, weight: Tensor) -> bool:
        """Adds inputs @ weight.T to hidden states in place; returns False if tiles do not fit them."""
        content = self._content(weight)
        if content is None or not self._fits(inputs) or not hidden.is_contiguous():
            return False
        self._write(hidden, inputs, content, added=hidden)
        return True

    def _fits(self, inputs: Tensor) -> bool:
        return self.fewest_rows <= len(inputs) <= _MOST_ROWS and inputs.is_contiguous()

    def _write(
        self, out: Tensor, inputs: Tensor, content: Tensor, bias: Tensor | None = None, added: Tensor | None = None
    ) -> None:
        rows, num_inputs = inputs.shape
        room = -(-rows // _TOGETHER) * _TOGETHER * num_inputs * self.num_parts
        tiles = inputs.new_empty(room, dtype=torch.bfloat16)
        self._multiply(
            rows,
            num_inputs // _DEPTH,
            out.shape[1],
            inputs.data_ptr(),
            content.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if added is None else added.data_ptr(),
            tiles.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def _content(self, weight: Tensor) -> Tensor | None:
        """Returns the tensor that the product reads; None if tiles do not fit the weight."""
        if not self._is_current:
            self._packed, self._is_current = as_tiles(weight), True
        return self._packed


class SplitWeight(TileWeight):
    """A float32 weight, read where it lies; each number is split into three bfloat16 numbers on the way.

    Small projections lie as [in, out], unless a trainer shares them, and are left to MKL, which is as fast.
    """

    num_parts = 3
    fewest_rows = 4  # MKL is faster with fewer

    def _content(self, weight: Tensor) -> Tensor | None:
        return weight if weight.is_contiguous() and weight.shape[1] % _DEPTH == 0 else None


_KINDS = {torch.bfloat16: ("amx.c", TileWeight), torch.float32: ("amx_split.c", SplitWeight)}


@torch.no_grad()
def as_tiles(weight: Tensor) -> Tensor | None:
    """Returns a copy [out / 16, in / 32, 16, 16, 2] of a weight [out, in], in which a pair of inputs is last.

    Outputs are filled up with zeros to a multiple of 32. None if the number of inputs is not one.
    """
    outputs, inputs = weight.shape
    if inputs % _DEPTH:
        return None
    whole = F.pad(weight, (0, 0, 0, -outputs % _TOGETHER))
    return whole.view(-1, _SIDE, inputs // _DEPTH, _DEPTH // 2, 2).permute(0, 2, 3, 1, 4).contiguous()


def make_tiles(weight: Tensor) -> Callable[[], PackedWeight] | None:
    """Returns the constructor of packed weights for a model with this head; None if they would not be faster."""
    if weight.dtype not in _KINDS or weight.device.type != "cpu" or not torch.cpu._is_amx_tile_supported():
        return None
    if weight.shape[1] % _DEPTH or (weight.dtype == torch.float32 and not is_worth_packing(weight)):
        return None  # oneDNN's order of the weights, which tiles replace, takes any number of inputs
    source, kind = _KINDS[weight.dtype]
    library = compiled(_FOLDER / source, {"MOST_ROWS": _MOST_ROWS})
    return partial(kind, library) if library.can_multiply() else None
