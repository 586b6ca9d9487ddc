"""Log-probabilities of chosen tokens, and their entropy, without ever building a [tokens, vocabulary] matrix.

The logits are computed one tile at a time, once in forward and once more in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows and columns of a tile of logits: in float32, 16 MiB on a CPU and 128 MiB on an accelerator. Smaller tiles are a
# few per cent faster on one quiet thread, but several threads on a busy machine pay for each operation they meet in.
_CPU_TILE = (1024, 4096)
_ACCELERATOR_TILE = (2048, 16384)

LOWEST = -1e20  # e to this is 0 as well, but an excluded token's -inf would make p log p and its gradient NaN


class Support(Protocol):
    """The tokens that each row's distribution is of."""

    def hide_others(self, logits: Tensor, rows: slice, columns: slice) -> None:
        """Overwrites the logits [rows, columns] of all other tokens by LOWEST."""
        ...


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = True,
    in_steps: bool = False,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns each target's log-probability, and the entropy, under softmax of the logits hidden @ weight.T + bias.

    The logits are multiplied by logit_scale, then capped as softcap * tanh(logits / softcap), then divided by the
    temperature. Both results are at least float32 and have gradients for hidden, weight and bias.

    Args:
        hidden: [N, H].
        weight: [V, H].
        targets: [N] int64 in [0, V).
        bias: [V]; -inf excludes a token, which then adds nothing to the entropy and to any gradient.
        softcap: largest absolute logit; None: no cap.
        with_entropy: False leaves the entropy NaN, so that nothing can take it for a value.
        in_steps: compute the logits by final_logits(), bit for bit, and not as fast as can be.
        support: the tokens that the softmax is of; None: all.

    Returns:
        The log-probabilities, [N], and the entropies, [N].
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: log-probabilities need one above 0.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}: it must be above 0, or None for no cap.")
    dtype = weight.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    kind = _LogitSteps if in_steps else _LogitTransform
    transform = kind(scale=logit_scale, softcap=softcap, temperature=temperature)
    with torch.autocast(hidden.device.type, enabled=False):
        held = None if bias is None else bias.to(dtype).clamp(min=LOWEST)
        logprobs, entropy = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden.to(dtype), weight.to(dtype), held, targets, transform, with_entropy, support
        )
    if bias is not None and softcap is None:  # a capped logit excludes no token
        logprobs = logprobs.masked_fill(bias[targets].isneginf(), float("-inf"))
    return logprobs, entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogitTransform:
    """The steps between the output of the matrix product and the softmax."""

    scale: float
    softcap: float | None
    temperature: float

    @property
    def slope_at_zero(self) -> float:
        """Derivative of a final logit with respect to the product, where nothing caps it."""
        return self.scale / self.temperature

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice, dtype: torch.dtype) -> Tensor:
        """Returns the final logits of a tile, [rows, columns], in dtype."""
        factor = self.slope_at_zero if self.softcap is None else self.scale / self.softcap
        # The product is scaled on its way out at no cost; beta = 0 leaves the bias unread.
        summand, beta = (hidden.new_zeros(1), 0.0) if bias is None else (bias[columns], factor)
        logits = torch.addmm(summand, hidden, weight[columns].T, beta=beta, alpha=factor).to(dtype)
        return logits if self.softcap is None else logits.tanh_().mul_(self.softcap / self.temperature)

    def slope_of_cap(self, logits: Tensor) -> Tensor:
        """Derivative of the cap at each final logit, 1 - tanh^2."""
        assert self.softcap is not None
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1)


class _LogitSteps(_LogitTransform):
    """Takes each step by itself and rounds after it."""

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice, dtype: torch.dtype) -> Tensor:
        """Returns the final logits of a tile, [rows, columns], in dtype."""
        product = F.linear(hidden, weight[columns], None if bias is None else bias[columns]).to(dtype)
        return final_logits(product, self.scale, self.softcap, self.temperature)


def final_logits(product: Tensor, scale: float, softcap: float | None, temperature: float = 1.0) -> Tensor:
    """Returns the logits from the product of the output head, which it overwrites."""
    if scale != 1:
        product.mul_(scale)
    if softcap is not None:
        product.div_(softcap).tanh_().mul_(softcap)
    return product if temperature == 1 else product.div_(temperature)


def logprobs_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the log-probabilities [N] of targets, from whole logits [N, V]: the bits of chosen_logprobs(in_steps)."""
    summary = _RowSummary(targets, logits.dtype, with_entropy=False)
    for columns in _slices(logits.shape[1], _tile(logits)[1]):
        summary.add(logits[:, columns].clamp(min=LOWEST), columns.start)
    return summary.chosen - (summary.maximum + summary.total.log())


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: _LogitTransform,
        with_entropy: bool,
        support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logsumexp = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        chosen = torch.empty_like(logsumexp)
        entropy = torch.full_like(logsumexp, float("nan"))
        num_rows, num_columns = _tile(hidden)
        for rows in _slices(hidden.shape[0], num_rows):
            summary = _RowSummary(targets[rows], dtype, with_entropy)
            for columns in _slices(weight.shape[0], num_columns):
                logits = transform.logits(hidden[rows], weight, bias, columns, dtype)
                if support is not None:
                    support.hide_others(logits, rows, columns)
                summary.add(logits, columns.start)
            logsumexp[rows], chosen[rows] = summary.maximum + summary.total.log(), summary.chosen
            if with_entropy:
                entropy[rows] = summary.total.log() - summary.moment / summary.total
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, entropy)
        ctx.transform, ctx.support = transform, support
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return chosen - logsumexp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, logsumexp, entropy = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * 7
        slope, dtype = ctx.transform.slope_at_zero, logsumexp.dtype
        per_row = [targets, logsumexp, entropy, *(None if grad is None else grad * slope for grad in grads)]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        num_rows, num_columns = _tile(hidden)
        for columns in _slices(weight.shape[0], num_columns):
            weight_sum = torch.zeros_like(weight[columns], dtype=dtype) if needs_weight else None
            bias_sum = torch.zeros_like(bias[columns], dtype=dtype) if needs_bias else None
            for rows in _slices(hidden.shape[0], num_rows):
                logits = ctx.transform.logits(hidden[rows], weight, bias, columns, dtype)
                slope_of_cap = None if ctx.transform.softcap is None else ctx.transform.slope_of_cap(logits)
                if ctx.support is not None:
                    ctx.support.hide_others(logits, rows, columns)
                parts: list[Any] = [None if part is None else part[rows] for part in per_row]
                grad = _logit_gradient(logits, columns.start, *parts)
                grad = (grad if slope_of_cap is None else grad.mul_(slope_of_cap)).to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] += grad @ weight[columns]
                if weight_sum is not None:
                    weight_sum += grad.T @ hidden[rows]
                if bias_sum is not None:
                    bias_sum += grad.sum(0, dtype=dtype)
            if grad_weight is not None and weight_sum is not None:
                grad_weight[columns] = weight_sum
            if grad_bias is not None and bias_sum is not None:
                grad_bias[columns] = bias_sum
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


class _RowSummary:
    """Statistics of a few rows of logits, gathered one tile of the vocabulary at a time."""

    def __init__(self, targets: Tensor, dtype: torch.dtype, with_entropy: bool) -> None:
        self.targets = targets
        self.with_entropy = with_entropy
        self.chosen = torch.zeros(targets.shape[0], dtype=dtype, device=targets.device)
        self.maximum = torch.full_like(self.chosen, float("-inf"))
        self.total = torch.zeros_like(self.chosen)  # sum of exp(logit - maximum)
        self.moment = torch.zeros_like(self.chosen)  # sum of exp(logit - maximum) * (logit - maximum)

    def add(self, logits: Tensor, first_column: int) -> None:
        """Adds a tile of logits, which it overwrites."""
        column, is_inside = _locate(self.targets, first_column, logits.shape[1])
        self.chosen = torch.where(is_inside, logits.gather(1, column[:, None])[:, 0], self.chosen)
        maximum = torch.maximum(self.maximum, logits.amax(1))
        shift = self.maximum - maximum
        scale = shift.exp()
        shifted = logits.sub_(maximum[:, None])
        weights = shifted.exp()
        if self.with_entropy:
            # The first tile shifts by minus infinity, from a sum of zero.
            shift = torch.where(self.total > 0, shift, 0)
            self.moment = scale * (self.moment + shift * self.total) + (weights * shifted).sum(1)
        self.total = scale * self.total + weights.sum(1)
        self.maximum = maximum


def _logit_gradient(
    logits: Tensor,
    first_column: int,
    targets: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Returns the gradient of a tile's final logits z: g_logprob * (chosen - p) - g_entropy * p * (log p + entropy).

    Overwrites the logits.
    """
    logp = logits.sub_(logsumexp[:, None])
    if grad_entropy is None:
        assert grad_logprobs is not None
        grad = logp.exp_().mul_(-grad_logprobs[:, None])
    else:
        constant = -grad_entropy * entropy
        if grad_logprobs is not None:
            constant = constant - grad_logprobs
        grad = logp.exp().mul_(logp.mul_(-grad_entropy[:, None]).add_(constant[:, None]))
    if grad_logprobs is not None:
        column, is_inside = _locate(targets, first_column, grad.shape[1])
        grad.scatter_add_(1, column[:, None], torch.where(is_inside, grad_logprobs, 0)[:, None])
    return grad


def _locate(targets: Tensor, first_column: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Returns each target's column in a tile, clamped to the tile, and whether it lies in the tile."""
    column = targets - first_column
    return column.clamp(0, num_columns - 1), (column >= 0) & (column < num_columns)


def _tile(hidden: Tensor) -> tuple[int, int]:
    """Returns the rows and columns of a tile of logits."""
    return _CPU_TILE if hidden.device.type == "cpu" else _ACCELERATOR_TILE


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
