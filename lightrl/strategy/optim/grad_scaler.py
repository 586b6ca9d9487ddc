"""Loss scaling for float16: losses are scaled up to keep small gradients, and a step that overflows is skipped."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from lightrl.strategy.optim.hooks import UpdateHook


class GradScaler(UpdateHook):
    """A loss scale that is the same on every rank, since all ranks agree on whether a step was finite.

    The numbers are those of torch.amp.GradScaler. A disabled scaler changes nothing.
    """

    def __init__(
        self,
        enabled: bool,
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if init_scale <= 0 or growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                f"init_scale {init_scale} must be above 0, growth_factor {growth_factor} above 1, backoff_factor "
                f"{backoff_factor} between 0 and 1, growth_interval {growth_interval} at least 1."
            )
        self.enabled = enabled
        self._scale = init_scale if enabled else 1.0
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0  # finite steps since the scale last changed
        # The step of another optimizer must not change the scale of gradients that wait for this one's.
        self._in_use: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()

    def get_scale(self) -> float:
        """Returns the factor by which losses are multiplied."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale."""
        return loss * self._scale if self.enabled else loss

    def update(self, is_finite: bool) -> None:
        """Adapts the scale after an optimizer step, taken or skipped."""
        if not self.enabled:
            return
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self._scale *= self._backoff_factor
        elif self._good_steps == self._growth_interval:
            self._scale *= self._growth_factor
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Returns the state that a checkpoint keeps."""
        return {"scale": self._scale, "good_steps": float(self._good_steps)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues from a state_dict() if both scalers are enabled."""
        if self.enabled and state:
            self._scale, self._good_steps = state["scale"], int(state["good_steps"])

    def loss_factor(self, optimizer: Optimizer) -> float:
        """Returns the scale that the optimizer's first loss since its last update had."""
        return self._in_use.setdefault(optimizer, self._scale)

    def after_update(self, optimizer: Optimizer, *, is_finite: bool) -> None:
        self._in_use.pop(optimizer, None)
        self.update(is_finite)

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {"grad_scaler": self.state_dict()}

    def restore(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.load_state_dict(state.get("grad_scaler", {}))
