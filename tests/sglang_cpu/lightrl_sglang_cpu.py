"""An SGLang platform of plain torch on the CPU, found by entry point in the engine's parent and in its children.

SGLang's own CPU support needs compiled kernels that no index serves. As an out-of-tree platform every layer falls back
to its torch code instead. Where there is a GPU this package does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_RELEASE = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation"
)
_ADAPTERS = "sglang.srt.lora.lora_manager.LoRAManager.__init__"


class PlainTorchPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def init_backend(self) -> None:
        # Runs in the schedulers. A CUDA build of torch names torch.cuda its device module even without a driver, and
        # a release of memory synchronises that module.
        torch.cuda.synchronize = _do_nothing
        torch.Tensor.pin_memory = _same


def _do_nothing(device: Any = None) -> None: ...


def _same(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor


class _WithoutPinning:
    """The module torch with functions that leave memory unpinned, since only a GPU's driver can pin it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*args, **options)

    def tensor(self, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*args, **options)


def platform() -> str | None:
    return None if torch.cuda.is_available() else f"{__name__}:PlainTorchPlatform"


def register_hooks() -> None:
    """Released weights are lost on a GPU; here they stay unless this loses them, and a missing sync would not show."""
    if not torch.cuda.is_available():
        HookRegistry.register(_RELEASE, _zero_released_weights, HookType.AFTER)
        HookRegistry.register(_ADAPTERS, _leave_unpinned, HookType.BEFORE)


def _leave_unpinned(*args: Any, **options: Any) -> None:
    """Adapters pin memory whether there is a GPU or not.

    This can go when they ask first (0.5.23: not yet):
    https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/lora/layers.py
    https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/lora/backend/torch_backend.py
    """
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = _WithoutPinning()


def _zero_released_weights(result: Any, manager: Any, request: Any) -> None:
    if not request.tags or "weights" in request.tags:
        for parameter in manager.tp_worker.model_runner.model.parameters():
            parameter.data.zero_()
