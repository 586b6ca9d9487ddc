"""Matrix products of a few rows with the weights of a model, which are most of an engine's work.

On an x86 CPU, the weights of large layers are kept twice while the engine is awake, the second time in the order that
oneDNN's kernels read. With 4 to 64 rows, such a product takes 0.4 to 0.85 times as long as an ordinary one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# From this number of elements on, a packed product is faster despite its longer way to the kernel.
LEAST_PACKED = {torch.float32: 1 << 18, torch.bfloat16: 1 << 16}
_NUM_ROWS = 64  # rows for which the order is chosen; it suits other numbers as well


class PackedWeight:
    """A weight in the order of oneDNN's kernels, which the first product after drop() makes.

    torch has these operators for compiled models; there is no public way to them:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/fx_passes/mkldnn_fusion.py (2.13: not yet).
    """

    def __init__(self) -> None:
        self._packed: Tensor | None = None
        self._is_current = False

    def drop(self) -> None:
        """Frees the memory; call it after the weight changed or was itself dropped."""
        self._packed, self._is_current = None, False

    def product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Returns inputs @ weight.T + bias for a weight [out, in]; None if an ordinary product is as fast."""
        if not self._is_current:
            self._packed, self._is_current = pack(weight), True
        if self._packed is None:
            return None
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, bias, "none", [], "")
        return result

    def add_product(self, hidden: Tensor, inputs: Tensor, weight: Tensor) -> bool:
        """Adds inputs @ weight.T to hidden states in place; returns False if an ordinary product is as fast."""
        product = self.product(inputs, weight)
        if product is not None:
            hidden.add_(product)
        return product is not None


@torch.no_grad()
def pack(weight: Tensor) -> Tensor | None:
    """Returns a copy of a weight [out, in] for packed products; None if they are not faster or unavailable."""
    if not is_worth_packing(weight):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _NUM_ROWS)
    return packed


def is_worth_packing(*weights: Tensor) -> bool:
    """Returns whether packing makes products with weights of one input faster on this machine, in their type."""
    dtype, is_on_cpu = weights[0].dtype, weights[0].device.type == "cpu"
    is_large = sum(weight.numel() for weight in weights) >= LEAST_PACKED.get(dtype, math.inf)
    return is_large and is_on_cpu and _can_pack(dtype)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    operators: Any = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or bool(operators._is_mkldnn_bf16_supported())


class PackedHead:
    """The output head with a packed weight, [n, in] to [n, vocab]."""

    def __init__(self, head: Any, packed: PackedWeight | None = None) -> None:
        self._head = head
        self._packed = packed or PackedWeight()

    def __call__(self, hidden: Tensor) -> Tensor:
        packed = self._packed.product(hidden, self._head.weight)
        return F.linear(hidden, self._head.weight) if packed is None else packed

    def refresh(self) -> None:
        """Drops the packed copy of the weight; call it after the weight changed."""
        self._packed.drop()


class FusedLinear:
    """Linear layers of one input as one product; their parameters become views of its storage.

    The storage is [in, out], the layout that matrix products of few rows read fastest.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = layers
        self._lay_side_by_side()

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs.mm(self.weight) if self.bias is None else torch.addmm(self.bias, inputs, self.weight)

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Adds the product to hidden states [n, out] in place, without a bias."""
        hidden.addmm_(inputs, self.weight)

    def packed_as(self, packed: PackedWeight) -> PackedLinear:
        """Returns the same layers with this packed weight; use only the result from then on."""
        return PackedLinear(self._layers, packed)

    def refresh(self) -> None:
        """Fuses again if the parameters got storage of their own, as by a move to another device and back."""
        start = self.weight.untyped_storage().data_ptr()
        if any(layer.weight.untyped_storage().data_ptr() != start for layer in self._layers):
            self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        """Uses the parameters where they lie now, and moves them only if they no longer lie side by side."""
        weight = _joined([layer.weight for layer in self._layers], self.weight.t())
        bias = None if self.bias is None else _joined([layer.bias for layer in self._layers], self.bias)
        if weight is None or (bias is None) != (self.bias is None):
            self._lay_side_by_side()
        else:
            self.weight, self.bias = weight.t(), bias

    @torch.no_grad()
    def _lay_side_by_side(self) -> None:
        """Joins the weights as [in, out], whatever their layout in memory, and the biases."""
        weights: list[Tensor] = [layer.weight for layer in self._layers]
        biases: list[Tensor] = [layer.bias for layer in self._layers]
        self.weight = _as_views(weights, self._laid_out(torch.cat(weights))).t()
        self.bias = None if biases[0] is None else _as_views(biases, torch.cat(biases))

    def _laid_out(self, weight: Tensor) -> Tensor:
        return weight.t().contiguous().t()


def _as_views(parameters: list[Tensor], whole: Tensor) -> Tensor:
    """Concatenates the parameters, makes them views of the result, and returns it."""
    for parameter, part in zip(parameters, whole.split([len(item) for item in parameters]), strict=True):
        parameter.data = part
    return whole


def _joined(parameters: list[Tensor], before: Tensor) -> Tensor | None:
    """Returns parameters as one tensor with the shape and layout of another, if they lie in memory like its parts."""
    first, start = parameters[0], parameters[0].storage_offset()
    for item in parameters:
        is_here = item.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_here or (item.storage_offset(), item.stride()) != (start, before.stride()):
            return None
        start += len(item) * item.stride(0)
    return first.data.as_strided(before.shape, before.stride())


class PackedLinear(FusedLinear):
    """Linear layers of one input as one product, with a packed weight if that is faster."""

    def __init__(self, layers: list[nn.Linear], packed: PackedWeight | None = None) -> None:
        self._packed = packed or PackedWeight()
        super().__init__(layers)

    def __call__(self, inputs: Tensor) -> Tensor:
        packed = self._packed.product(inputs, self.weight.t(), self.bias)
        return super().__call__(inputs) if packed is None else packed

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Adds the product to hidden states [n, out] in place, without a bias."""
        if not self._packed.add_product(hidden, inputs, self.weight.t()):
            super().add_to(hidden, inputs)

    def packed_as(self, packed: PackedWeight) -> PackedLinear:
        """Uses this packed weight from now on; the parameters stay where they are, since a trainer may share them."""
        self._packed = packed
        return self

    def refresh(self) -> None:
        """Drops the packed weight; call it after the parameters changed."""
        super().refresh()
        self._packed.drop()

    def _laid_out(self, weight: Tensor) -> Tensor:
        return weight if is_worth_packing(weight) else super()._laid_out(weight)


def fused_linear(layers: list[nn.Linear]) -> FusedLinear:
    """Fuses layers, with a packed weight if that is faster."""
    return PackedLinear(layers) if is_worth_packing(*(layer.weight for layer in layers)) else FusedLinear(layers)
