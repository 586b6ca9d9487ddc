"""Results that the methods of a strategy return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrl.comm import Comm

Batches: TypeAlias = Sequence[Any] | Mapping[str, Any]  # micro-batches, or a dictionary of tensors to cut into some
LossFn: TypeAlias = Callable[[Any, Any], Tensor]  # (model output, micro-batch) -> a mean
WeightFn: TypeAlias = Callable[[Any], float | Tensor]  # micro-batch -> how many terms its loss is a mean of


class OptimizerStep(NamedTuple):
    """Result of optimizer_step."""

    grad_norm: float  # before clipping, over all ranks
    lr_list: list[float]  # used for this update, one per parameter group
    stepped: bool = True  # False between the boundaries of an accumulation
    skipped: bool = False  # norm or loss was not finite, so nothing changed on any rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatchResult:
    """Result of train_batch, over all ranks."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    total_weight: float
    num_micro_batches: int  # on each rank
    reason: str = ""  # why it was skipped: the sample, and the input or output that is not finite


class GroupBatches(NamedTuple):
    """The micro-batches that a rank runs: those of all ranks that split a model or its tokens, in the same order."""

    batches: list[Any]
    mine: range  # indices of this rank's own

    @classmethod
    def of_group(cls, data: Sequence[Any], comm: Comm, group: dist.ProcessGroup, device: torch.device) -> GroupBatches:
        """Exchanges micro-batches with the other ranks of a group, over the host."""
        host = torch.device("cpu")
        parts = comm.all_gather_object([item.to(host) for item in data], group)
        index = dist.get_rank(group)
        parts[index] = list(data)
        start = sum(len(part) for part in parts[:index])
        return cls([item.to(device) for part in parts for item in part], range(start, start + len(data)))


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model that is trained, with its optimizer and schedule."""

    model: Any  # the class that prepare_trained was given, such as Policy
    optimizer: Optimizer
    scheduler: LRScheduler | None
