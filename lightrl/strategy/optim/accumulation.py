"""AccumulationByCalls: an update after several calls of backward(), for loops that call backward() themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightrl.comm import Comm
from lightrl.strategy.layout.plain import SavedTensors
from lightrl.strategy.optim.hooks import UpdateHook, attach, hooks_of


class AccumulationByCalls(UpdateHook):
    """Counts the calls since the last update. train_batch does without: it knows all micro-batches of an update."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_wanted = 1
        self._share = 1.0  # of the wanted calls of all ranks, those that were made
        self._is_finite = True

    def count(self, num_wanted: int, loss: Tensor) -> None:
        """Counts a call of backward(), whose loss was divided by num_wanted, the number of calls for an update."""
        self._num_calls += 1
        self._num_wanted = num_wanted
        self._is_finite = self._is_finite and bool(loss.detach().isfinite().all())

    def may_update(self, comm: Comm) -> bool:
        """Returns whether every loss of every rank was finite; the gradient may be finite even if a loss was not.

        Under ddp, ZeRO 0 and ZeRO 1, ranks may have made different numbers of calls, as at the end of their data, but
        must divide by one number. Under fsdp, ZeRO 2 and ZeRO 3, whose micro-batches have collectives, they would hang.
        """
        own = {"share": self._num_calls / self._num_wanted, "is_finite": float(self._is_finite)}
        mean = comm.all_reduce(own)
        self._share = mean["share"]
        return mean["is_finite"] == 1

    def is_boundary(self) -> bool:
        """Returns whether enough calls were counted, or none, in which case the gradients came from elsewhere."""
        return self._num_calls == 0 or self._num_calls >= self._num_wanted

    def gradient_divisor(self) -> float:
        """Makes an early update the mean over the micro-batches that have run on all ranks; may_update() counts."""
        return self._share if 0 < self._share < 1 else 1.0

    def after_update(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        self._num_calls, self._share, self._is_finite = 0, 1.0, True

    def read_tensors(self, read: Callable[[str], SavedTensors], state: dict[str, Any]) -> None:
        """Restarts the count, because other weights were loaded and the gradients dropped."""
        self._num_calls, self._is_finite = 0, True


def accumulation_of(optimizer: Optimizer) -> AccumulationByCalls:
    """Returns the optimizer's accumulation; the first call attaches it."""
    attached = [hook for hook in hooks_of(optimizer) if isinstance(hook, AccumulationByCalls)]
    if not attached:
        attached.append(AccumulationByCalls())
        attach(optimizer, attached[0])
    return attached[0]


def accumulation_steps(train_batch_size: int, micro_train_batch_size: int, *, world_size: int) -> int:
    """Returns how many micro-batches a rank runs per update; raises ValueError if the sizes do not fit.

    Ranks that together run the micro-batches of all of them (--tp_size, --sp_size) count as one.
    """
    for name, value in (("train_batch_size", train_batch_size), ("micro_train_batch_size", micro_train_batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1.")
    at_once = micro_train_batch_size * world_size
    if train_batch_size % at_once:
        low = train_batch_size // at_once * at_once
        nearest = f"{low} or {low + at_once}" if low else f"{at_once}"
        raise ValueError(
            f"train_batch_size {train_batch_size} is not a multiple of micro_train_batch_size {micro_train_batch_size} "
            f"x world size {world_size} = {at_once}. Nearest valid train_batch_size: {nearest}."
        )
    return train_batch_size // at_once
