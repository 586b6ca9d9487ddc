"""Log-probabilities of chosen tokens when ranks split the vocabulary; no rank ever holds whole logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.models.logprobs import LogitTransform, _ChosenLogprobs, _RowSummary, _slices, _tile


def split_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first_row: int,
    group: dist.ProcessGroup,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Returns each target's log-probability and the entropy, as chosen_logprobs() does for a whole vocabulary.

    The gradient for hidden is this rank's share; the caller must sum it over the group.

    Args:
        hidden: [N, H], the same on all ranks.
        weight: [V / ranks, H], this rank's rows of the output matrix.
        targets: [N] int64 in [0, V).
        first_row: the token of this rank's first row.
    """
    transform = LogitTransform(temperature=temperature, with_entropy=with_entropy)
    dtype = weight.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    with torch.autocast(hidden.device.type, enabled=False):
        scores: tuple[Tensor, Tensor] = _SplitLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden.to(dtype), weight.to(dtype), targets - first_row, transform, group
        )
    return scores


class _SplitLogprobs(torch.autograd.Function):
    """Summarizes this rank's columns of the logits, then joins the summaries; the backward needs no collective."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        summary = torch.zeros(4, hidden.shape[0], dtype=dtype, device=hidden.device)  # maximum, total, moment, chosen
        num_rows, num_columns = _tile(hidden)
        for rows in _slices(hidden.shape[0], num_rows):
            part = _RowSummary(targets[rows], dtype, transform.with_entropy)
            for columns in _slices(weight.shape[0], num_columns):
                part.add(transform.logits(hidden, weight, None, rows, columns), columns.start)
            summary[:, rows] = torch.stack([part.maximum, part.total, part.moment, part.chosen])
        own_maximum, total, moment, chosen = summary
        maximum = own_maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shift = own_maximum - maximum
        sums = torch.stack([total * shift.exp(), (moment + shift * total) * shift.exp(), chosen])
        dist.all_reduce(sums, group=group)
        logsumexp = maximum + sums[0].log()
        entropy = sums[0].log() - sums[1] / sums[0]
        if not transform.with_entropy:
            entropy = torch.full_like(entropy, float("nan"))
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(hidden, weight, None, targets, logsumexp, entropy)
        ctx.transform = transform
        ctx.set_materialize_grads(False)
        return sums[2] - logsumexp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # The gradient of a column depends only on its own logits and the joined sums.
        grad_hidden, grad_weight, *_ = _ChosenLogprobs.backward(_Columns(ctx), *grads)
        return grad_hidden, grad_weight, None, None, None


class _Columns:
    """The context that _ChosenLogprobs.backward() reads, without the bias that this head lacks."""

    def __init__(self, ctx: Any) -> None:
        self.saved_tensors = ctx.saved_tensors
        self.transform = ctx.transform
        self.needs_input_grad = (*ctx.needs_input_grad[:2], False)
