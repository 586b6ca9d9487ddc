"""Logits: stands for the logits of a micro-batch, [T, V], in a loss function, and computes a few rows at a time.

Operations that treat each row separately (log_softmax, gather, cross_entropy, a division by the temperature ...) run in
chunks, in the forward and again in the backward, so the whole matrix never exists.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightrl.models.logprobs import LogitTransform, chosen_logprobs

_CPU_CHUNK, _ACCELERATOR_CHUNK = 4 << 20, 32 << 20  # logits in a chunk: 16 MiB and 128 MiB in float32
_SAME_SHAPE = {
    "float", "double", "half", "bfloat16", "to", "type_as", "contiguous", "clone", "exp", "log", "log1p", "tanh", "neg",
    "abs", "square", "sqrt", "clamp", "add", "sub", "mul", "div", "true_divide", "pow", "log_softmax", "softmax",
}  # fmt: skip
_OVER_ROWS = {"gather", "sum", "mean", "logsumexp", "argmax", "amax", "max"}
_NEEDS_DIM = _OVER_ROWS | {"log_softmax", "softmax"}

RowFunction = Callable[[Tensor, Any], Tensor]  # from the logits of some rows, and the choice of these rows, to a result


class LanguageModel(Protocol):
    """The part of a Policy that turns hidden states into logits."""

    hf: Any
    logits: LogitTransform


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output layer: logits are hidden @ weight.T + bias, scaled and capped."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None
    scale: float

    @property
    def num_logits(self) -> int:
        """Size of the vocabulary."""
        return self.weight.shape[0]

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the logits of a few rows in float32."""
        logits = F.linear(hidden, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Logits:
    """Stands for logits [T, V] in a loss function; each operation over the rows gives an ordinary tensor.

    An unknown operation computes the whole matrix and warns.
    """

    hidden: Tensor  # [T, H]
    head: Head
    change: RowFunction | None = None  # what has been done to each row so far

    @classmethod
    def of(cls, policy: LanguageModel, hidden: Tensor) -> Logits:
        """Returns the logits of a policy's hidden states, in the type in which the policy computes."""
        make_own: Callable[[Tensor], Logits] | None = getattr(policy, "__dict__", {}).get("logits_of")
        if make_own is not None:  # where the output layer is not in the model itself
            return make_own(hidden)
        layer: Any = policy.hf.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        dtype = layer.weight.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        head = Head(
            weight=layer.weight.to(dtype),
            bias=None if bias is None else bias.to(dtype),
            softcap=policy.logits.softcap,
            scale=policy.logits.logit_scale,
        )
        return cls(hidden=hidden.to(dtype), head=head)

    # ---- As a tensor -------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits, [T, V]."""
        return torch.Size((self.hidden.shape[0], self.head.num_logits))

    @property
    def device(self) -> torch.device:
        """Device of the hidden states and of all results."""
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """float32, or float64 for a model in double precision."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def ndim(self) -> int:
        """Number of dimensions, always 2."""
        return 2

    def dim(self) -> int:
        """Returns the number of dimensions, always 2."""
        return 2

    def size(self, dim: int | None = None) -> Any:
        """Returns the shape, [T, V], or one of its two sizes."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def detach(self) -> Logits:
        """Returns the same logits without their gradient."""
        bias = None if self.head.bias is None else self.head.bias.detach()
        head = replace(self.head, weight=self.head.weight.detach(), bias=bias)
        return replace(self, hidden=self.hidden.detach(), head=head)

    def __getitem__(self, index: Any) -> Any:
        if self.change is not None or isinstance(index, tuple | int):
            return self._whole(f"the index {index!r}")[index]
        return replace(self, hidden=self.hidden[index])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"Logits have no attribute {name!r}.")
        return partial(self._call, name, getattr(Tensor, name))

    def __neg__(self) -> Any:
        return self.neg()

    def __add__(self, other: Any) -> Any:
        return self.add(other)

    def __sub__(self, other: Any) -> Any:
        return self.sub(other)

    def __mul__(self, other: Any) -> Any:
        return self.mul(other)

    def __truediv__(self, other: Any) -> Any:
        return self.div(other)

    def __rsub__(self, other: Any) -> Any:
        return self.neg().add(other)

    def __pow__(self, other: Any) -> Any:
        return self.pow(other)

    __radd__ = __add__
    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Logits):
            return args[0]._call(func.__name__, func, *args[1:], **kwargs)
        if "input" in kwargs and isinstance(kwargs["input"], Logits):
            return kwargs.pop("input")._call(func.__name__, func, *args, **kwargs)
        if len(args) == 2 and func.__name__ in ("add", "sub", "mul"):  # a tensor on the left
            tensor, logits = args
            signed = -logits if func.__name__ == "sub" else logits
            return signed * tensor if func.__name__ == "mul" else signed + tensor
        args = [item._whole(func.__name__) if isinstance(item, Logits) else item for item in args]
        return func(*args, **kwargs)

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a torch function whose first argument is these logits."""
        if name == "cross_entropy":
            return self._cross_entropy(function, *args, **kwargs)
        is_known = name in _SAME_SHAPE or name in _OVER_ROWS
        if not is_known or (name in _NEEDS_DIM and not _is_over_rows(args, kwargs)):
            return function(self._whole(name), *args, **kwargs)
        operands = (*args, *kwargs.values())
        if not all(self._goes_by_rows(item) for item in operands):
            args = tuple(item._whole(name) if isinstance(item, Logits) else item for item in args)
            return function(self._whole(name), *args, **kwargs)

        def change(rows: Tensor, which: Any) -> Any:
            cut = [_cut(item, rows, which, len(self)) for item in args]
            named = {key: _cut(item, rows, which, len(self)) for key, item in kwargs.items()}
            return function(self._changed(rows, which), *cut, **named)

        return replace(self, change=change) if name in _SAME_SHAPE else self._chunked(change)

    def _goes_by_rows(self, item: Any) -> bool:
        """Returns whether an operand is the same for all rows, has a row for each, or stems from the same logits."""
        if isinstance(item, Logits):
            return item.hidden is self.hidden
        if isinstance(item, Tensor) and item.dim():
            return item.dim() == 2 and item.shape[0] == len(self)
        return True

    def _cross_entropy(self, function: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        reduction = kwargs.pop("reduction", "mean")
        if args or kwargs.get("weight") is not None or target.dim() != 1:
            return function(self._whole("cross_entropy"), target, *args, reduction=reduction, **kwargs)  # type: ignore[no-any-return]
        losses = self.map(lambda rows, part: function(rows, part, reduction="none", **kwargs), target)
        if reduction == "none":
            return losses
        counted = (target != kwargs.get("ignore_index", -100)).sum()
        return losses.sum() if reduction == "sum" else losses.sum() / counted

    # ---- In chunks ---------------------------------------------------------------------------------------------

    def map(self, function: Callable[..., Tensor], *per_row: Tensor) -> Tensor:
        """Calls function(logits, *values) for a few rows at a time and returns the results joined along dim 0.

        Args:
            function: takes logits [r, V] and the same r rows of each further tensor; returns [r, ...].
            per_row: tensors of T rows.
        """
        joined: Tensor = self._chunked(
            lambda rows, which: function(self._changed(rows, which), *(values[which] for values in per_row))
        )
        return joined

    def _changed(self, rows: Tensor, which: Any) -> Tensor:
        return rows if self.change is None else self.change(rows, which)

    def _chunked(self, function: RowFunction) -> Any:
        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, which: slice) -> Any:
            return function(self.head.logits(hidden, weight, bias), which)

        parts = []
        with torch.autocast(self.device.type, enabled=False):
            for which in self._slices():
                inputs = (self.hidden[which], self.head.weight, self.head.bias, which)
                parts.append(checkpoint(run, *inputs, use_reentrant=False) if torch.is_grad_enabled() else run(*inputs))
        if isinstance(parts[0], tuple):  # max and min return values and indices
            return type(parts[0])([torch.cat(column) for column in zip(*parts, strict=True)])
        return torch.cat(parts)

    def _slices(self) -> Iterator[slice]:
        limit = _CPU_CHUNK if self.device.type == "cpu" else _ACCELERATOR_CHUNK
        step = max(1, limit // self.shape[1])
        return (slice(start, start + step) for start in range(0, max(1, len(self)), step))

    def _whole(self, what: str) -> Tensor:
        warnings.warn(
            f"{what} on logits computes all {self.shape[0]} x {self.shape[1]} of them at once. Use gather_logprobs(), "
            "log_softmax, gather or another operation along the last dim, or logits.map(), to compute them in chunks.",
            stacklevel=4,
        )
        with torch.autocast(self.device.type, enabled=False):
            return self._changed(self.head.logits(self.hidden, self.head.weight, self.head.bias), slice(None))


def _is_over_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an operation runs along the last dim."""
    dim = kwargs.get("dim", args[0] if args else None)
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    return type(dim) is int and dim in (-1, 1)  # not a bool, nor the other tensor in max(logits, other)


def _cut(item: Any, rows: Tensor, which: Any, num_rows: int) -> Any:
    if isinstance(item, Logits):
        return item._changed(rows, which)
    if isinstance(item, Tensor) and item.dim() == 2 and item.shape[0] == num_rows:
        return item[which]
    return item


# ---- Log-probabilities -------------------------------------------------------------------------------------------


def gather_logprobs(logits: Logits | Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the log-probability of each label, [T], under logits [T, V] (or [..., V]) at a temperature."""
    return gather_logprobs_entropy(logits, labels, temperature, with_entropy=False)[0]


def gather_logprobs_entropy(
    logits: Logits | Tensor, labels: Tensor, temperature: float = 1.0, *, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each label and the entropy of each row, which is NaN if with_entropy is False."""
    if isinstance(logits, Logits) and logits.change is None:
        head = logits.head
        transform = LogitTransform(
            temperature=temperature, softcap=head.softcap, logit_scale=head.scale, with_entropy=with_entropy
        )
        return chosen_logprobs(logits.hidden, head.weight, labels, transform, bias=head.bias)
    logprobs: Any = (logits / temperature).log_softmax(-1)
    chosen: Tensor = logprobs.gather(-1, labels[..., None]).squeeze(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else torch.full_like(chosen, float("nan"))
    return chosen, entropy
