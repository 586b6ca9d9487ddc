"""One process, no process group: the plain reference that every other strategy must equal."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightrl.strategy.torch_native import TorchStrategy


class SingleStrategy(TorchStrategy):
    """The whole model on this process's device."""

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        super().setup_distributed(timeout, num_gpu_per_node)
        if self.comm.world > 1:
            raise ValueError(
                f"--strategy single runs in one process, but torchrun started {self.comm.world}. "
                "Use --strategy fsdp, or start one process."
            )

    def prepare_model(self, model: nn.Module) -> nn.Module:
        enable_gradient_checkpointing(self.unwrap_model(model), self.options.gradient_checkpointing)
        model = model.to(self.device)
        if self.options.dtype == "bfloat16":
            compute_in_bfloat16(model, self.device)
        return model


def compute_in_bfloat16(model: nn.Module, device: torch.device) -> None:
    """Whoever calls the model, as under FSDP's mixed precision; the parameters stay as they are."""
    model.forward = torch.autocast(device.type, dtype=torch.bfloat16)(model.forward)


def enable_gradient_checkpointing(model: Any, wanted: bool) -> None:
    """For HF models only; others have no such switch and refuse it aloud."""
    if not wanted or not any(parameter.requires_grad for parameter in model.parameters()):
        return
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(f"--gradient_checkpointing needs a transformers model, not {type(model).__name__}.")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
