"""One process, no process group: the plain reference that every other strategy must equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
        return model.to(self.device)

    def before_micro_batch(self, model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        return self._compute_dtype()

    @torch.no_grad()
    def forward(self, data: Any, *, model: nn.Module | None = None) -> list[Any]:
        with self._compute_dtype():
            return super().forward(data, model=model)

    @contextmanager
    def _compute_dtype(self) -> Iterator[None]:
        is_bfloat16 = self.options.dtype == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_bfloat16):
            yield


def enable_gradient_checkpointing(model: Any, wanted: bool) -> None:
    """For HF models only; others have no such switch and refuse it aloud."""
    if not wanted or not any(parameter.requires_grad for parameter in model.parameters()):
        return
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(f"--gradient_checkpointing needs a transformers model, not {type(model).__name__}.")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
