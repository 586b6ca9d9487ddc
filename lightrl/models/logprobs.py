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
# few per cent faster on one quiet thread, but on a busy machine every operation costs several threads a rendezvous.
_CPU_TILE = (1024, 4096)
_ACCELERATOR_TILE = (2048, 16384)

LOWEST = -1e20  # its exp is 0 too, while -inf for an excluded token would make p log p and its gradient NaN


class Support(Protocol):
    """The tokens over which the distribution of each row extends."""

    def hide_others(self, logits: Tensor, rows: slice, columns: slice) -> Tensor:
        """Overwrites the logits of all other tokens with LOWEST and returns the logits, [rows, columns]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """The steps from the output of the matrix product to the softmax, and whether to compute its entropy.

    The output is multiplied by logit_scale, then capped as softcap * tanh(logits / softcap), then divided by the
    temperature.
    """

    temperature: float = 1.0
    softcap: float | None = None  # largest absolute logit; None: no cap
    logit_scale: float = 1.0
    support: Support | None = None  # the tokens over which the softmax is taken; None: all
    with_entropy: bool = True  # False leaves the entropy NaN, so that nothing can take it for a value

    def __post_init__(self) -> None:
        if self.temperature <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise self._not_positive()

    def _not_positive(self) -> ValueError:
        if self.temperature <= 0:
            return ValueError(f"temperature is {self.temperature}: log-probabilities need one above 0.")
        return ValueError(f"softcap is {self.softcap}: it must be above 0, or None for no cap.")

    @property
    def slope_at_zero(self) -> float:
        """Derivative of a final logit with respect to the product where the cap has no effect."""
        return self.logit_scale / self.temperature

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, columns: slice) -> Tensor:
        """Returns the final logits of a tile, [rows, columns], at least in float32."""
        factor = self.slope_at_zero if self.softcap is None else self.logit_scale / self.softcap
        # The product is scaled on its way out at no cost; beta = 0 leaves the bias unread.
        summand, beta = (hidden.new_zeros(1), 0.0) if bias is None else (bias[columns], factor)
        logits = torch.addmm(summand, hidden[rows], weight[columns].T, beta=beta, alpha=factor).to(_at_least(hidden))
        if self.softcap is not None:
            logits = logits.tanh_().mul_(self.softcap / self.temperature)
        return logits if self.support is None else self.support.hide_others(logits, rows, columns)

    def slope_of_cap(self, logits: Tensor) -> Tensor:
        """Derivative of the cap at each final logit, 1 - tanh^2; 0 for the tokens that are hidden."""
        assert self.softcap is not None
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1).clamp_(min=0)


class LogitSteps(LogitTransform):
    """Takes each step separately and rounds after it: equals final_logits() bit for bit, at some cost in speed."""

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, columns: slice) -> Tensor:
        """Returns the final logits of a tile, [rows, columns], at least in float32."""
        product = F.linear(hidden[rows], weight[columns], None if bias is None else bias[columns])
        logits = final_logits(product.to(_at_least(hidden)), self.logit_scale, self.softcap, self.temperature)
        return logits if self.support is None else self.support.hide_others(logits, rows, columns)


PLAIN = LogitTransform()


def chosen_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, transform: LogitTransform = PLAIN, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns each target's log-probability, and the entropy, under the softmax of hidden @ weight.T + bias.

    Both results are at least float32 and have gradients for hidden, weight and bias.

    Args:
        hidden: [N, H].
        weight: [V, H].
        targets: [N] int64 in [0, V).
        transform: the steps from these products to the softmax.
        bias: [V]; -inf excludes a token, which then contributes nothing to the entropy or to any gradient.

    Returns:
        The log-probabilities, [N], and the entropies, [N].
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):
        held = None if bias is None else bias.to(dtype).clamp(min=LOWEST)
        logprobs, entropy = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden.to(dtype), weight.to(dtype), held, targets, transform
        )
    if bias is not None and transform.softcap is None:  # a cap makes -inf finite, which excludes no token
        logprobs = logprobs.masked_fill(bias[targets].isneginf(), float("-inf"))
    return logprobs, entropy


def final_logits(product: Tensor, scale: float, softcap: float | None, temperature: float = 1.0) -> Tensor:
    """Returns the logits, written over the output head's product."""
    if scale != 1:
        product.mul_(scale)
    if softcap is not None:
        product.div_(softcap).tanh_().mul_(softcap)
    return product if temperature == 1 else product.div_(temperature)


def logprobs_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the targets' log-probabilities, [N], from whole logits, [N, V]; equals LogitSteps bit for bit."""
    summary = _RowSummary(targets, logits.dtype, with_entropy=False)
    for columns in _slices(logits.shape[1], _tile(logits)[1]):
        summary.add(logits[:, columns].clamp(min=LOWEST), columns.start)
    return summary.chosen - (summary.maximum + summary.total.log())


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform
    ) -> tuple[Tensor, Tensor]:
        logsumexp = torch.empty(hidden.shape[0], dtype=_at_least(hidden), device=hidden.device)
        chosen = torch.empty_like(logsumexp)
        entropy = torch.full_like(logsumexp, float("nan"))
        num_rows, num_columns = _tile(hidden)
        for rows in _slices(hidden.shape[0], num_rows):
            summary = _RowSummary(targets[rows], logsumexp.dtype, transform.with_entropy)
            for columns in _slices(weight.shape[0], num_columns):
                summary.add(transform.logits(hidden, weight, bias, rows, columns), columns.start)
            logsumexp[rows], chosen[rows] = summary.maximum + summary.total.log(), summary.chosen
            if transform.with_entropy:
                entropy[rows] = summary.total.log() - summary.moment / summary.total
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, entropy)
        ctx.transform = transform
        ctx.set_materialize_grads(False)
        if not transform.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return chosen - logsumexp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * 5
        hidden, weight, bias, *_ = ctx.saved_tensors
        dtype = _at_least(hidden)
        gradient = _TileGradient(ctx, grads[0]) if grads[1] is None else _TileGradientWithEntropy(ctx, *grads)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden: Any = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        grad_weight: Any = torch.zeros_like(weight) if needs_weight else None
        grad_bias: Any = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        num_rows, num_columns = _tile(hidden)
        for columns in _slices(weight.shape[0], num_columns):
            weight_sum: Any = torch.zeros_like(weight[columns], dtype=dtype) if needs_weight else None
            for rows in _slices(hidden.shape[0], num_rows):
                grad = gradient.of(ctx.transform.logits(hidden, weight, bias, rows, columns), rows, columns)
                grad = grad.to(hidden.dtype)
                if needs_hidden:
                    grad_hidden[rows] += grad @ weight[columns]
                if needs_weight:
                    weight_sum += grad.T @ hidden[rows]
                if needs_bias:
                    grad_bias[columns] += grad.sum(0, dtype=dtype)
            if needs_weight:
                grad_weight[columns] = weight_sum
        grad_hidden, grad_bias = (None if grad is None else grad.to(hidden.dtype) for grad in (grad_hidden, grad_bias))
        return grad_hidden, grad_weight, grad_bias, None, None


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
            # At the first tile the old maximum is minus infinity, and the sum is zero.
            shift = torch.where(self.total > 0, shift, 0)
            self.moment = scale * (self.moment + shift * self.total) + (weights * shifted).sum(1)
        self.total = scale * self.total + weights.sum(1)
        self.maximum = maximum


class _TileGradient:
    """The gradient of the products behind final logits z, if only the logprobs have one: g_logprob * (chosen - p).

    The slopes of the steps from a product to its final logit multiply it.
    """

    def __init__(self, ctx: Any, grad_logprobs: Tensor) -> None:
        """Reads the tensors that forward() saved in ctx."""
        self.transform: LogitTransform = ctx.transform
        *_, self.targets, self.logsumexp, self.entropy = ctx.saved_tensors
        self.of_chosen = grad_logprobs * self.transform.slope_at_zero

    def of(self, logits: Tensor, rows: slice, columns: slice) -> Tensor:
        """Returns the gradient of a tile, written over the tile's logits."""
        slope_of_cap = None if self.transform.softcap is None else self.transform.slope_of_cap(logits)
        grad = self.of_all(logits.sub_(self.logsumexp[rows, None]), rows)
        column, is_inside = _locate(self.targets[rows], columns.start, grad.shape[1])
        grad.scatter_add_(1, column[:, None], torch.where(is_inside, self.of_chosen[rows], 0)[:, None])
        return grad if slope_of_cap is None else grad.mul_(slope_of_cap)

    def of_all(self, logp: Tensor, rows: slice) -> Tensor:
        """Returns the part of the gradient that all tokens have, from their logprobs, which it overwrites."""
        return logp.exp_().mul_(-self.of_chosen[rows, None])


class _TileGradientWithEntropy(_TileGradient):
    """The gradient if the entropy has one too, which adds -g_entropy * p * (log p + entropy)."""

    def __init__(self, ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor) -> None:
        super().__init__(ctx, torch.zeros_like(grad_entropy) if grad_logprobs is None else grad_logprobs)
        self.of_entropy = grad_entropy * self.transform.slope_at_zero
        self.constant = -self.of_entropy * self.entropy - self.of_chosen

    def of_all(self, logp: Tensor, rows: slice) -> Tensor:
        """Returns the part of the gradient that all tokens have, from their logprobs, which it overwrites."""
        return logp.exp().mul_(logp.mul_(-self.of_entropy[rows, None]).add_(self.constant[rows, None]))


def _locate(targets: Tensor, first_column: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Returns each target's column in a tile, clamped to the tile, and whether it lies in the tile."""
    column = targets - first_column
    return column.clamp(0, num_columns - 1), (column >= 0) & (column < num_columns)


def _at_least(hidden: Tensor) -> torch.dtype:
    """Returns the type of sums and results: float32, or the input's type if that is wider."""
    return torch.promote_types(hidden.dtype, torch.float32)


def _tile(hidden: Tensor) -> tuple[int, int]:
    """Returns the rows and columns of a tile of logits."""
    return _CPU_TILE if hidden.device.type == "cpu" else _ACCELERATOR_TILE


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
