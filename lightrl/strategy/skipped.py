"""Updates that are not made because nothing is trained in them, or because their loss is not finite.

A plain update calls nothing here. All ranks have agreed before they call a function of this module.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.comm import Comm
from lightrl.strategy.layout.plain import PlainLayout
from lightrl.strategy.optim.optimizers import TrainedModels
from lightrl.strategy.results import OptimizerStep, TrainBatchResult, TrainedModel

logger = logging.getLogger(__name__)

_MAX_FINDINGS = 3  # per rank, in a message


class Skipping(Protocol):
    """The parts of a strategy that this module needs."""

    comm: Comm
    layout: PlainLayout
    trained: TrainedModels

    def forward(self, data: Sequence[Any], *, model: nn.Module | None = None) -> list[Any]:
        """Returns model(mb) for each micro-batch."""
        ...


def nothing_to_train(strategy: Skipping, trained: TrainedModel, total: float) -> TrainBatchResult:
    """Returns the result of an update with nothing to train, where even a gradient of 0 moves weights, by momentum."""
    reason = f"There is nothing to train: the weights of all micro-batches of all ranks add up to {total:g}."
    _warn(strategy.comm, reason)
    strategy.trained.scheduled.add(trained.optimizer)
    rates = strategy.trained.rates(trained.optimizer)
    return TrainBatchResult(
        loss=0.0, grad_norm=0.0, lr=rates[0], skipped=True, total_weight=total, num_micro_batches=0, reason=reason
    )


def drop_update(strategy: Skipping, optimizer: Optimizer, model: nn.Module) -> OptimizerStep:
    """Drops the gradients of an update whose loss is not finite, as if their norm were not finite."""
    strategy.layout.drop_gradients(model)  # not by optimizer.zero_grad: ZeRO keeps buffers there that it needs again
    strategy.trained.scheduled.add(optimizer)  # skipped updates do not count in a schedule
    for hook in strategy.trained.hooks_of(optimizer):
        hook.after_update(optimizer, is_finite=False)
    return OptimizerStep(grad_norm=math.nan, lr_list=strategy.trained.rates(optimizer), skipped=True)


def drop_accumulated(strategy: Skipping, optimizer: Optimizer, model: nn.Module) -> OptimizerStep:
    """Drops the gradients of several calls of backward() if one of the losses was not finite."""
    _warn(strategy.comm, "A loss that backward() was given on some rank is not finite.")
    return drop_update(strategy, optimizer, model)


def explained(strategy: Skipping, result: TrainBatchResult, model: nn.Module, data: Sequence[Any]) -> TrainBatchResult:
    """Adds the reason to the result of an update that was skipped, and logs it."""
    if math.isfinite(result.loss):
        reason = f"The norm of the gradient is {result.grad_norm:g}, though the loss is {result.loss:g}."
    else:
        findings = list(_not_finite(data, strategy.forward(data, model=model)))
        by_rank = strategy.comm.all_gather_object(findings)
        told = [f"rank {rank}: {'; '.join(found)}." for rank, found in enumerate(by_rank) if found]
        told = told or ["What came in and what the model returned are finite, so look at the loss function."]
        reason = " ".join([f"The loss is {result.loss:g}.", *told])
    _warn(strategy.comm, reason)
    return replace(result, reason=reason)


def _warn(comm: Comm, reason: str) -> None:
    if comm.is_main:
        logger.warning("%s No rank makes this update: weights, optimizer and schedule stay as they are.", reason)


# ---- What is not finite, and in which sample -------------------------------------------------------------------------


def _not_finite(data: Sequence[Any], outputs: Sequence[Any]) -> Iterator[str]:
    """Describes a few tensors that have a trained entry that is not finite: which tensor, value and place."""
    found = (
        text
        for micro_batch, output in zip(data, outputs, strict=True)
        for name, values in (*_float_tensors(micro_batch, "input"), *_float_tensors(output, "output"))
        if (text := _first_not_finite(name, values, micro_batch))
    )
    for text, _ in zip(found, range(_MAX_FINDINGS), strict=False):
        yield text


def _first_not_finite(name: str, values: Tensor, micro_batch: Any) -> str:
    is_bad = ~values.detach().isfinite()
    mask, owners = _entry(micro_batch, "loss_mask"), _entry(micro_batch, "sequence_index")
    has_tokens = torch.is_tensor(mask) and mask.shape == values.shape
    if has_tokens:
        is_bad = is_bad & mask.to(is_bad)  # a user's mask may hold numbers, or lie elsewhere
    places = is_bad.reshape(-1).nonzero().reshape(-1).tolist()
    if not places or (name == "entropy" and values.isnan().all()):  # NaN if the model was asked for none
        return ""
    first, value = places[0], f"{name} is {float(values.reshape(-1)[places[0]]):g}"
    if not has_tokens or owners is None:
        return f"{value} at index {first}"
    owner = int(owners[first])
    token = int((owners[:first] == owner).sum())
    keys = _entry(micro_batch, "keys")
    return f"{value} at response token {token} of sample {owner if keys is None else keys[owner]}"


def _float_tensors(item: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and values of the float tensors in a tensor, a mapping, a record or a named tuple."""
    if torch.is_tensor(item):
        if item.is_floating_point():
            yield name, item
        return
    entries: Mapping[str, Any] = {}
    if isinstance(item, Mapping):
        entries = item
    elif hasattr(item, "__dataclass_fields__") or hasattr(item, "_fields"):
        entries = {key: getattr(item, key) for key in getattr(item, "__dataclass_fields__", None) or item._fields}
    for key, value in entries.items():
        yield from _float_tensors(value, key)


def _entry(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)
