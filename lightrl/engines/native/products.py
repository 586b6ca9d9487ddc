"""Matrix products of a few rows with the weights of a model, the most of what an engine computes.

On an x86 CPU the weights of large layers are kept a second time while the engine is awake, in the order that oneDNN's
kernels read. For 4 to 64 rows such a product takes 0.4 to 0.85 of the time of an ordinary one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements from which on a packed product is faster in spite of its longer way to the kernel.
LEAST_PACKED = {torch.float32: 1 << 18, torch.bfloat16: 1 << 16}
_NUM_ROWS = 64  # that the order is chosen for; it suits other numbers as well


class PackedWeight:
    """A weight in the order of oneDNN's kernels, made by the first product after drop().

    torch has these operators for compiled models; there is no public way to them:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/fx_passes/mkldnn_fusion.py (2.13: not yet).
    """

    def __init__(self) -> None:
        self._packed: Tensor | None = None
        self._is_current = False

    def drop(self) -> None:
        """Gives the memory back; call it after the weight changed or was dropped itself."""
        self._packed, self._is_current = None, False

    def product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Returns inputs @ weight.T + bias for a weight [out, in]; None where an ordinary product is as fast."""
        if not self._is_current:
            self._packed, self._is_current = pack(weight), True
        if self._packed is None:
            return None
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, bias, "none", [], "")
        return result


@torch.no_grad()
def pack(weight: Tensor) -> Tensor | None:
    """Returns a copy of a weight [out, in] for packed products; None if they are not faster, or not to be had."""
    if not is_worth_packing(weight):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _NUM_ROWS)
    return packed


def is_worth_packing(weight: Tensor) -> bool:
    """Returns whether products with a weight are faster after packing, here and in its type."""
    least = LEAST_PACKED.get(weight.dtype)
    return least is not None and weight.numel() >= least and weight.device.type == "cpu" and _can_pack(weight.dtype)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    operators: Any = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or bool(operators._is_mkldnn_bf16_supported())


class OutputHead:
    """The product that gives the logits, [n, in] to [n, vocab]."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self._packed = PackedWeight()

    def __call__(self, hidden: Tensor) -> Tensor:
        packed = self._packed.product(hidden, self._head.weight)
        return F.linear(hidden, self._head.weight) if packed is None else packed

    def refresh(self) -> None:
        """Forgets what is derived from the weight; call it after it changed."""
        self._packed.drop()


class FusedLinear:
    """Linear layers of one input as one product; their parameters become views of its storage.

    The storage is [in, out], the layout that matrix products of few rows read fastest, unless the weight is packed.
    """

    may_pack = True

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = layers
        self._packed = PackedWeight()
        self.weight, self.bias = self._lay_side_by_side()

    def __call__(self, inputs: Tensor) -> Tensor:
        packed = self._packed.product(inputs, self.weight.t(), self.bias) if self.may_pack else None
        if packed is not None:
            return packed
        return inputs.mm(self.weight) if self.bias is None else torch.addmm(self.bias, inputs, self.weight)

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Adds the product to hidden states in place, without a bias."""
        packed = self._packed.product(inputs, self.weight.t()) if self.may_pack else None
        if packed is None:
            hidden.addmm_(inputs, self.weight)
        else:
            hidden.add_(packed)

    def refresh(self) -> None:
        """Fuses again if something (a move to another device and back) gave the parameters storage of their own."""
        start = self.weight.untyped_storage().data_ptr()
        if any(layer.weight.untyped_storage().data_ptr() != start for layer in self._layers):
            self.weight, self.bias = self._lay_side_by_side()
        self._packed.drop()

    @torch.no_grad()
    def _lay_side_by_side(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weight as [in, out], whatever its layout in memory, and the bias."""
        weight = torch.cat([layer.weight for layer in self._layers])
        if not (self.may_pack and is_worth_packing(weight)):
            weight = weight.t().contiguous().t()
        sizes = [layer.out_features for layer in self._layers]
        for layer, part in zip(self._layers, weight.split(sizes), strict=True):
            layer.weight.data = part
        if self._layers[0].bias is None:
            return weight.t(), None
        bias = torch.cat([layer.bias for layer in self._layers])
        for layer, part in zip(self._layers, bias.split(sizes), strict=True):
            layer.bias.data = part
        return weight.t(), bias
