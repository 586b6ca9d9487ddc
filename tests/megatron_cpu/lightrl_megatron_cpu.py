"""Lets megatron-core run on a machine without a GPU, for the tests of lightrl.

It replaces functions of torch.cuda in the whole process, so only a process of its own may import it: name it as
`--strategy lightrl_megatron_cpu:CpuMegatronStrategy` where this folder is the working directory.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from typing import Any

sys.modules["flash_mla"] = None  # type: ignore[assignment]  # SGLang brings it, and without a GPU it does not load

import megatron.core.models.gpt.gpt_layer_specs  # it is what imports flash_mla
import megatron.core.models.gpt.gpt_model  # noqa: F401  # before the replacements: it looks at torch.cuda
import megatron.core.tensor_parallel.random as core_random
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch
from torch.overrides import TorchFunctionMode

from lightrl.strategy.megatron.strategy import MegatronStrategy

del sys.modules["flash_mla"]
_HOST = torch.device("cpu")


class _Event:
    def __init__(self, *args: Any, **settings: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Stream(contextlib.nullcontext):  # type: ignore[type-arg]
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__()

    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> _Event:
        return _Event()


class _OnHost(TorchFunctionMode):
    """Makes tensors on the host that are asked for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = dict(kwargs or {})
        if "cuda" in str(settings.get("device", "")):
            settings["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and "cuda" in str(args[1]):
            args = (args[0], "cpu", *args[2:])
        return function(*args, **settings)


def _stay(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def replace_cuda() -> None:
    """Replaces what megatron-core calls of torch.cuda; there is no way back."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _HOST
    cuda.synchronize = lambda *args, **settings: None
    cuda.Stream, cuda.Event = _Stream, _Event  # classes, since engines name them in types
    cuda.current_stream = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state = core_random._get_cuda_rng_state = lambda *args, **settings: torch.get_rng_state()
    cuda.set_rng_state = core_random._set_cuda_rng_state = lambda state, *args, **settings: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **settings: None
    moe_utils.te_general_gemm = None  # a name that only Transformer Engine gives
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _stay
    _OnHost().__enter__()


class CpuMegatronStrategy(MegatronStrategy):
    """MegatronStrategy on gloo and the host's cores."""

    needs_gpu = False

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        replace_cuda()
        super().setup_distributed(timeout, num_gpu_per_node)
