"""One process, no process group: the plain reference that every other strategy must equal."""

from __future__ import annotations

from datetime import timedelta

from torch import nn

from lightrl.comm import known_world
from lightrl.strategy.layout.plain import PlainLayout
from lightrl.strategy.torch_native import TorchStrategy


class SingleStrategy(TorchStrategy):
    """Keeps the whole model on this process's device."""

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        """Picks the device; refuses a world of several processes."""
        if known_world() > 1:
            raise _several_ranks(known_world())
        super().setup_distributed(timeout, num_gpu_per_node)

    def make_layout(self) -> PlainLayout:
        """Returns the layout of whole parameters."""
        return PlainLayout(self.comm)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device."""
        model = model.to(self.device)
        self.set_up_computation(model)
        return model


def _several_ranks(count: int) -> ValueError:
    return ValueError(
        f"--strategy single runs in one process, but torchrun started {count}. Use --strategy fsdp, or "
        "start one process."
    )
