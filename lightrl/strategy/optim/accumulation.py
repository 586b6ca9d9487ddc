"""AccumulationByCalls: an update after several calls of backward(), for loops that call it themselves."""

from __future__ import annotations

from torch.optim import Optimizer

from lightrl.strategy.optim.hooks import UpdateHook, attach, hooks_of


class AccumulationByCalls(UpdateHook):
    """Counts the calls since the last update. train_batch needs none of it: it knows all micro-batches of an update."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_wanted = 1

    def count(self, num_wanted: int) -> None:
        """Counts one call of backward() whose loss was divided by num_wanted, the calls that make an update."""
        self._num_calls += 1
        self._num_wanted = num_wanted

    def is_boundary(self) -> bool:
        """Returns whether enough calls were counted, or none: then the gradients came from elsewhere."""
        return self._num_calls == 0 or self._num_calls >= self._num_wanted

    def gradient_divisor(self) -> float:
        """Makes an early update the mean over the micro-batches that there were."""
        is_early = 0 < self._num_calls < self._num_wanted
        return self._num_calls / self._num_wanted if is_early else 1.0

    def after_update(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        self._num_calls = 0


def accumulation_of(optimizer: Optimizer) -> AccumulationByCalls:
    """Returns the optimizer's accumulation, attached at the first call."""
    attached = [hook for hook in hooks_of(optimizer) if isinstance(hook, AccumulationByCalls)]
    if not attached:
        attached.append(AccumulationByCalls())
        attach(optimizer, attached[0])
    return attached[0]
