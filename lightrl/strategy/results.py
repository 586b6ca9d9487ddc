"""What the methods of a strategy return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batches: TypeAlias = Sequence[Any] | Mapping[str, Any]  # micro-batches, or one dictionary of tensors to cut into some
LossFn: TypeAlias = Callable[[Any, Any], Tensor]  # of a model's output and its micro-batch; a mean
WeightFn: TypeAlias = Callable[[Any], float | Tensor]  # of a micro-batch: how many terms its loss is a mean of


class OptimizerStep(NamedTuple):
    """What optimizer_step did."""

    grad_norm: float  # before clipping, over all ranks
    lr_list: list[float]  # used for this update, one per parameter group
    stepped: bool = True  # False between the boundaries of an accumulation
    skipped: bool = False  # the norm or the loss was not finite: nothing was changed, on any rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatchResult:
    """What train_batch did, over all ranks."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    total_weight: float
    num_micro_batches: int  # on each rank
    reason: str = ""  # why it was skipped, with the sample and the input or output that is not finite


class GroupBatches(NamedTuple):
    """The micro-batches that a rank runs: those of all ranks that split a model or its tokens, in one order."""

    batches: list[Any]
    mine: range  # the indices of those that this rank brought


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model that is trained, with what updates it."""

    model: Any  # the class that prepare_trained was given, such as Policy
    optimizer: Optimizer
    scheduler: LRScheduler | None
