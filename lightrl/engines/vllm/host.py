"""Undoes what vLLM does to its host process. The functions need vLLM, and import it when called.

Each patch of vLLM's internals names the upstream file, at the version that the tests use, and when it can go.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightrl.comm import Comm, found_world

_MADV_DONTNEED = 4
_OWN_VARIABLES = "VLLM_"  # vLLM also reads these later
_kept_allocators: list[Any] = []  # of GPU memory; see keep_allocators()


@contextmanager
def process_state_kept(comm: Comm, device: torch.device) -> Iterator[None]:
    """Restores what building an engine changes: random states, environment, number of threads, frozen heap.

    vLLM reseeds all generators, forbids torch.set_num_threads, and rewrites LOCAL_WORLD_SIZE, LD_PRELOAD and others:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/cpu_worker.py
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/executor/uniproc_executor.py
    """
    environment, frozen = dict(os.environ), gc.get_freeze_count()
    python, numpy = random.getstate(), np.random.get_state()
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine must live in this process
    os.environ.setdefault("RANK", str(comm.rank))  # the external launcher reads them even if the group exists already
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    try:
        with torch_random_state_kept(device), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's warnings about objects that vLLM inspects
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        _restore_environment(environment)
        if not frozen:
            gc.unfreeze()  # the trainer's objects were frozen together with vLLM's


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) | set(before):
        if name.startswith(_OWN_VARIABLES):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@contextmanager
def torch_random_state_kept(device: torch.device) -> Iterator[None]:
    """Restores torch's random state, from which vLLM draws even if each request has its own seed."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def set_defaults(device: torch.device) -> None:
    """Silences vLLM and turns off its usage reports, before it is imported; the user's settings stay."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if device.type == "cuda" else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM sets it for the whole process, which trains with it too.
    os.environ.setdefault("VLLM_FLOAT32_MATMUL_PRECISION", torch.get_float32_matmul_precision())
    theirs = logging.getLogger("vllm")  # set up now, since messages during the import would get through
    if theirs.level == logging.NOTSET:
        theirs.setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())


@contextmanager
def buffers_kept_from_dummy_loader() -> Iterator[None]:
    """Keeps the load format "dummy" from changing buffers, which no weight sync restores.

    vLLM's loader also fills buffers with noise, such as those with which Qwen-VL normalises pixels. A load format of
    our own would not help: for any but "dummy", vLLM looks into the checkpoint and may untie embeddings that the
    trainer ties. This can go when the dummy loader skips buffers (0.32: not yet):
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/model_loader/dummy_loader.py
    """
    from vllm.model_executor import model_loader

    class EmptyLoader(model_loader.DummyModelLoader):  # type: ignore[misc, unused-ignore]
        """Loader that leaves the weights at zero until the first sync."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Sets all parameters to zero, and nothing else."""
            for parameter in model.parameters():
                parameter.data.zero_()

    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    original = loaders["dummy"]
    loaders["dummy"] = EmptyLoader
    try:
        yield
    finally:
        loaders["dummy"] = original


def spare_trainers_classes() -> None:
    """Keeps vLLM from making the classes of transformers, of which the trainer's models are, its own.

    For a family without code of its own (OLMo 2, GPT-NeoX, Phi, Starcoder 2), it runs transformers' model and patches
    __init__ and __call__ of its class, for torch.compile: no other model of the class could be made or run. This can go
    when it patches a subclass (0.32: not yet):
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/transformers/base.py
    """
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_cls_for_torch_compile = staticmethod(lambda *_, **__: None)


# ---- On a CPU


def adapt_cpu(job: str) -> None:
    """Patches vLLM's CPU backend; further calls change nothing. job: a unique name, the same on all ranks."""
    _leave_memory_policy()
    _keep_linear_weights()
    _skip_compilation()
    _use_private_shared_memory(job)


def _leave_memory_policy() -> None:
    """Keeps vLLM from binding all memory of the process, even the trainer's, to one NUMA node.

    This can go when the binding is an option (0.32: not yet): https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/cpu_worker.py
    """
    import vllm._custom_ops  # noqa: F401  (an optional package; defines torch.ops._C)

    operations: Any = torch.ops._C
    operations.init_cpu_memory_env = lambda nodes: None


def _keep_linear_weights() -> None:
    """Keeps linear weights as they are: if packed for oneDNN and deleted, no later load would reach them.

    This can go when a reload is right for tied embeddings on a CPU (0.32: not yet):
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/utils.py
    """
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if getattr(original, "keeps_weights", False):
        return

    def keep(layer: Any, remove_weight: bool = False) -> None:
        if layer.weight.ndim != 2:  # convolutions and experts have methods of their own
            original(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    keep.keeps_weights = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = keep


def _skip_compilation() -> None:
    """Leaves two small functions uncompiled, for which inductor would need 10 s and more even in eager mode.

    They count the rank of a sampled token, and mask token ids of other ranks of a group. This can go when enforce_eager
    covers them (0.32: not yet):
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/sample/ops/logprobs.py
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/vocab_parallel_embedding.py
    """
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.v1.sample import sampler

    for module, name in (
        (sampler, "batched_count_greater_than"),
        (vocab_parallel_embedding, "get_masked_input_and_mask"),
    ):
        compiled = getattr(module, name)
        setattr(module, name, getattr(compiled, "_torchdynamo_orig_callable", compiled))


def _use_private_shared_memory(job: str) -> None:
    """Gives shared memory a different name in each job, and removes the name once all ranks have mapped it.

    vLLM's name is the same for every job on a machine, so two at once, or one after a killed one, could not start.
    This can go when the name differs under external_launcher (0.32: not yet):
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/device_communicators/cpu_communicator.py
    """
    from vllm.distributed.device_communicators import cpu_communicator

    owner = cpu_communicator._CPUSHMDistributed
    original = getattr(owner._init_cpu_shm, "original", owner._init_cpu_shm)

    def name_of_group(communicator: Any) -> str:
        return f"lightrl-{job}-{communicator.unique_name}-{'_'.join(map(str, communicator.ranks))}"

    def init_and_unlink(self: Any) -> Any:
        handle = original(self)  # ends with a barrier, so every rank of the group has joined
        for path in Path("/dev/shm").glob(f"*{glob_escaped(self.group_name)}*"):
            with suppress(FileNotFoundError):  # each rank tries them all
                path.unlink()
        return handle

    init_and_unlink.original = original  # type: ignore[attr-defined]
    owner.make_group_name = staticmethod(name_of_group)
    owner._init_cpu_shm = init_and_unlink


def glob_escaped(name: str) -> str:
    """Escapes a name for use in a glob pattern."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def register_in_process(architecture: str) -> None:
    """Imports a model's class here; otherwise vLLM inspects it in a subprocess for 10 s, once per machine.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/registry.py
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    if hasattr(known, "module_name"):  # not loaded yet
        ModelRegistry.register_model(architecture, known.load_model_cls())


def discard_pages(storages: dict[int, torch.UntypedStorage]) -> int:
    """Frees the memory of CPU storages and returns its bytes; they keep their addresses and read as zeros."""
    page, freed = os.sysconf("SC_PAGE_SIZE"), 0
    libc = ctypes.CDLL(None, use_errno=True)
    for storage in storages.values():
        first = -(-storage.data_ptr() // page) * page
        length = (storage.data_ptr() + storage.nbytes()) // page * page - first
        if length <= 0:
            continue
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise could not free the engine's KV cache")
        freed += length
    return freed


def kv_storages(llm: Any) -> dict[int, torch.UntypedStorage]:
    """Returns the storages of the KV cache by address, since all layers may share one."""
    caches: list[Tensor] = worker_of(llm).model_runner.kv_caches
    return {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}


def worker_of(llm: Any) -> Any:
    """Returns the worker, which lives in this process: vllm/v1/executor/uniproc_executor.py."""
    return llm.llm_engine.model_executor.driver_worker.worker


def reloads_whole(llm: Any) -> bool:
    """Returns whether a load in place would not reach all that kernels read.

    After a load from files, vLLM packs experts, quantises weights, and splits a matrix of latent attention (MLA).
    """
    (is_derived,) = llm.apply_model(lambda model: any(map(_derives_weights, model.modules())))
    return bool(is_derived or llm.llm_engine.model_config.quantization is not None)


def _derives_weights(module: nn.Module) -> bool:
    return _is_latent(module) or hasattr(module, "w13_weight")


def _is_latent(module: nn.Module) -> bool:
    return hasattr(module, "kv_lora_rank") and hasattr(module, "process_weights_after_loading")


def split_latent_attention(model: nn.Module) -> set[str]:
    """Splits a matrix of latent attention (MLA) again after a load in place; returns the names of the parts.

    vLLM drops the matrix where AMX instructions compute the parts, so that there no load in place succeeds.
    """
    dtype, parts = next(model.parameters()).dtype, set()
    module: Any
    for path, module in model.named_modules():
        if _is_latent(module) and not getattr(module, "is_amx_bmm_enabled", False):
            module.process_weights_after_loading(dtype)
            parts |= {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
    return parts


def repack_experts(model: nn.Module) -> None:
    """Packs experts after a load, which leaves them in a checkpoint's layout; CPU kernels read another one.

    This can go when a load packs them itself: vLLM does so at the first load only (0.32):
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    module: Any
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        isa = getattr(getattr(kernel, "fused_experts", None), "isa", None)
        if isa is None or not hasattr(module, "w13_weight"):
            continue
        for parameter in (module.w13_weight, module.w2_weight):
            parameter.data.copy_(cpu_prepack_moe_weight(parameter.data, isa).view_as(parameter))


# ---- On a GPU


def keep_unnamed_tensors(llm: Any) -> None:
    """Makes sleep level 2 keep what no load brings back: tensors that are no parameters and no buffers.

    At level 2 vLLM discards all memory that it took while it made the model, and restores buffers only. Constants, the
    inputs of CUDA graphs and slots for adapters would come back with anything in them. This can go when vLLM keeps them
    (0.32: not yet): https://github.com/vllm-project/vllm/issues/53343
    """
    from vllm import device_allocator

    allocator: Any = device_allocator.get_mem_allocator_instance()
    (named,) = llm.apply_model(_named_addresses)
    for pool, _ in allocator.allocator_and_pools.get("weights", ()):
        for segment in pool.snapshot():
            used = {block["address"] for block in segment["blocks"] if block["state"] == "active_allocated"}
            data = allocator.pointer_to_data.get(segment["address"])
            if data is not None and not used <= named:
                data.tag = "runtime"  # moved to host memory and back at every level


def _named_addresses(model: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in chain(model.parameters(), model.buffers())}


def keep_allocators() -> None:
    """Keeps vLLM's allocators for as long as the process: freeing a tensor later through a dropped one would crash.

    vLLM drops them with its pools, but a few tensors live until its engine is collected. This can go when it waits for
    these (0.32: not yet): https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/device_allocator/cumem.py
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.instance is not None:  # as on a GPU with sleep mode
        for made in CuMemAllocator.instance.allocator_and_pools.values():
            _kept_allocators.extend(allocator for _, allocator in made)


# ---- The end


def spare_process_group(llm: Any) -> None:
    """Keeps the end of the engine or the program from destroying the default process group, the trainer's.

    This can go when vLLM destroys only a group that it made (0.32: not yet): https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/core_client.py
    """
    llm.llm_engine.engine_core._finalizer.detach()


def shut_down(llm: Any) -> None:
    """Ends the engine's worker like vLLM's own shutdown, but does not touch the process groups.

    From vLLM 0.33 on, the executor's shutdown also destroys the groups, which other engines of the process may use.
    """
    keep_allocators()
    llm.llm_engine.engine_core.engine_core.scheduler.shutdown()
    llm.llm_engine.model_executor.driver_worker.shutdown()
    gc.unfreeze()


class _OpenEngines:
    """Counts the engines of this process, which share vLLM's process groups; the last one leaves them."""

    def __init__(self) -> None:
        self._num = 0
        self._made_default_group = False

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts the engine that the body makes; one that fails leaves nothing to the next."""
        self._made_default_group |= not found_world().is_distributed
        self._num += 1
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Counts an engine that was closed or never completed."""
        self._num -= 1
        if not self._num:
            leave_groups(made_default_group=self._made_default_group)
            self._made_default_group = False


open_engines = _OpenEngines()


def leave_groups(*, made_default_group: bool) -> None:
    """Leaves vLLM's groups, which all engines of a process share; the default group only if vLLM made it.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/parallel_state.py
    """
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if made_default_group:
        parallel_state.destroy_distributed_environment()
    elif parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
