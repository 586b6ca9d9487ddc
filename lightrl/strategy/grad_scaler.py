"""Loss scaling for float16: gradients too small for the type are computed larger, and too large ones skip the step."""

from __future__ import annotations

from torch import Tensor


class GradScaler:
    """A scale that every rank holds alike, since whether a step was finite is agreed before update() is called.

    The numbers are those of torch.amp.GradScaler; disabled, it leaves everything as it is.
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
        self._good_steps = 0  # since the scale changed last

    def get_scale(self) -> float:
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale if self.enabled else loss

    def update(self, is_finite: bool) -> None:
        """After each optimizer step, taken or skipped."""
        if not self.enabled:
            return
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self._scale *= self._backoff_factor
        elif self._good_steps == self._growth_interval:
            self._scale *= self._growth_factor
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self._scale, "good_steps": float(self._good_steps)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self._scale, self._good_steps = state["scale"], int(state["good_steps"])
