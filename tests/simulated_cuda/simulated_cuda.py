"""A CUDA device for machines that have none: its memory is the host's, and the CPU's kernels compute on it.

    python tests/simulated_cuda/simulated_cuda.py LIBRARY PROGRAM [ARGUMENTS]

Torch takes its tensors for CUDA tensors. So a program shows here where it mixes devices, reads a tensor of the device
as an array, or does something else on a GPU than on a CPU; it should compute what it computes on the CPU. Memory is
counted. Each rank of torchrun has a device of its own, and gloo takes NCCL's place. It shows nothing of CUDA's kernels
and streams.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("device.cpp")
LIBRARY = "SIMULATED_CUDA"  # the environment variable that names what build() made
_TOTAL = 1 << 34  # bytes that the device says it has
_resize_on_cpu = torch.UntypedStorage.resize_
_init_process_group = dist.init_process_group


class Stream:
    """Stands for streams and events, in which everything has already happened."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class Nccl:
    """A group over gloo that takes tensors of the device."""

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._gloo, name)
        return lambda tensors, *rest: call([torch.ops.simulated_cuda.on_host(item) for item in tensors], *rest)


def compiler() -> str | None:
    """Returns the C++ compiler of this machine, if it has one."""
    return os.environ.get("CXX") or shutil.which("g++")


def build(folder: Path) -> Path:
    """Compiles the device into a library that activate() takes."""
    library, torch_folder = folder / "simulated_cuda.so", Path(torch.__file__).parent
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    command = [str(compiler()), "-shared", "-fPIC", "-std=c++20", "-O0", "-w", str(SOURCE), "-o", str(library)]
    links = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    subprocess.run([*command, *(f"-I{path}" for path in includes), *links], check=True, timeout=240)
    return library


def activate(library: str) -> None:
    """Gives this process the device. There is no way back."""
    torch.ops.load_library(library)
    device: Any = torch.cuda
    values = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "simulated",
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(total_memory=_TOTAL, uuid="simulated", name="simulated"),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        **dict.fromkeys(("_lazy_init", "set_device", "synchronize", "empty_cache", "set_rng_state", "manual_seed")),
        "manual_seed_all": None,
    }
    for name, value in values.items():
        setattr(device, name, lambda *_, answer=value, **__: answer)
    torch._C._cuda_getDevice = device.current_device  # of those who hold the function that torch.cuda had
    device.memory_allocated = device.memory_reserved = lambda *_: torch.ops.simulated_cuda.allocated()
    device.max_memory_allocated = lambda *_: torch.ops.simulated_cuda.peak()
    device.reset_peak_memory_stats = lambda *_: torch.ops.simulated_cuda.forget_peak()
    device.mem_get_info = lambda *_: (_TOTAL - device.memory_allocated(), _TOTAL)
    device.nvtx.range_push = device.nvtx.range_pop = lambda *_: None
    device.Stream = device.Event = Stream
    device.stream = device.current_stream = lambda *_: Stream()
    torch.UntypedStorage.resize_ = _resize
    dist.init_process_group, dist.ProcessGroupNCCL = _with_gloo, Nccl
    os.environ["LOCAL_RANK"] = "0"  # the number of the device
    device.graph_pool_handle = lambda: None
    importlib.import_module("lightrl.engines.native.replay").capture = _run_again


def _with_gloo(backend: str, *, device_id: object = None, **options: Any) -> None:
    _init_process_group(backend.replace("nccl", "gloo"), **options)


def _run_again(compute: Callable[[], torch.Tensor], _: object) -> tuple[Callable[[], object], torch.Tensor]:
    """Stands for a capture as a graph: computes again, from the same memory into the same memory."""
    result = compute()
    return lambda: result.copy_(compute()), result


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize_on_cpu(storage, size)
    whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    torch.ops.simulated_cuda.resize_storage(whole, size)
    return storage


def pytest_configure() -> None:
    """Runs the tests of this process on the device, with `-p simulated_cuda`."""
    activate(os.environ[LIBRARY])


if __name__ == "__main__":
    activate(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
