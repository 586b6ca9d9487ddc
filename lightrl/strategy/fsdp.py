"""FSDP2: every parameter sharded over the ranks (or over the ranks of a replica), gathered block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightrl.strategy.bucketed_gather import gather_in_buckets
from lightrl.strategy.offload import local
from lightrl.strategy.single import enable_gradient_checkpointing
from lightrl.strategy.torch_native import TorchStrategy, ensure_process_group


class FSDPStrategy(TorchStrategy):
    """Shards each transformer block as a unit and the rest (tied embeddings included) in the root unit."""

    mesh: DeviceMesh
    steps_whole_matrices = False

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        super().setup_distributed(timeout, num_gpu_per_node)
        self.comm = ensure_process_group(self.comm, self.device)
        self.mesh = self._build_mesh()

    def _build_mesh(self) -> DeviceMesh:
        world, replicas = self.comm.world, self.options.fsdp.replicate_size
        if world % replicas:
            valid = [size for size in range(1, world + 1) if world % size == 0]
            raise ValueError(f"--fsdp.replicate_size {replicas} does not divide {world} ranks. Valid: {valid}.")
        if replicas == 1:
            return init_device_mesh(self.device.type, (world,), mesh_dim_names=("shard",))
        return init_device_mesh(self.device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))

    @property
    def averaging_ranks(self) -> int:
        return self.comm.world

    @property
    def materializes_weights(self) -> bool:
        return self.comm.is_main

    # ---- Placing a model ---------------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Rank 0's weights, sharded over all; the other ranks' model may be on the meta device."""
        enable_gradient_checkpointing(self.unwrap_model(model), self.options.gradient_checkpointing)
        source = {name: tensor.detach() for name, tensor in _named_tensors(model)} if self.comm.is_main else {}
        settings = self._sharding()
        if self.options.dtype == "bfloat16":
            self._shard_float32_parts(model, settings)
        for block in reversed(transformer_blocks(model)):  # blocks inside blocks first
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        model.to_empty(device="cpu" if self.options.fsdp.cpu_offload else self.device)
        _move_buffers(model, self.device)  # they meet activations, wherever the parameters wait
        for name, tensor in _named_tensors(model):
            self._fill_from_main(tensor, source.pop(name, None))
        return model

    def _shard_float32_parts(self, model: nn.Module, settings: dict[str, Any]) -> None:
        """Modules that ask for it, such as a value head, are units whose weights are not rounded for their forward."""
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=settings["mp_policy"].reduce_dtype)
        for module in model.modules():
            if getattr(module, "computes_in_float32", False):
                fully_shard(module, **{**settings, "mp_policy": policy})

    def _sharding(self) -> dict[str, Any]:
        fsdp = self.options.fsdp
        compute = torch.bfloat16 if self.options.dtype == "bfloat16" else None
        reduce = torch.bfloat16 if fsdp.reduce_dtype == "bfloat16" else torch.float32
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if fsdp.cpu_offload else OffloadPolicy()
        return {
            "mesh": self.mesh,
            "reshard_after_forward": fsdp.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce),
            "offload_policy": offload,
        }

    @torch.no_grad()
    def _fill_from_main(self, tensor: Tensor, source: Tensor | None) -> None:
        """One whole tensor at a time, so that a rank never holds more than its shards and one tensor."""
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if source is not None:
            whole.copy_(source)
        self.comm.broadcast_tensor(whole)
        self.copy_whole(tensor, whole)

    # ---- Training ----------------------------------------------------------------------------------------------

    def before_micro_batch(self, model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last_micro_batch)
        return nullcontext()

    def after_forward_only(self, model: nn.Module) -> None:
        """The root unit stays gathered after a forward; its parameters would be read as plain tensors."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # ---- Whole tensors -----------------------------------------------------------------------------------------

    def gather_named(
        self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        bucket_bytes = self.options.sync_bucket_mb << 20
        return gather_in_buckets(named, dtype=dtype, device=self.device, bucket_bytes=bucket_bytes)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, the non-persistent ones too: to_empty leaves garbage in all of them."""
    return [*sorted(model.named_parameters()), *sorted(model.named_buffers())]


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers to shard one by one: what the HF model calls unsplittable, else the members of its ModuleLists."""
    names = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = [module for group in lists for module in group]
    return [block for block in blocks if block is not model and not _shares_parameters(block, model)]


def _shares_parameters(block: nn.Module, model: nn.Module) -> bool:
    """A block that holds a tied weight must stay in the root unit: two units cannot share a parameter."""
    inside = {id(parameter) for parameter in block.parameters()}
    owned = set(block.modules())
    outside = (p for module in model.modules() if module not in owned for p in module.parameters(recurse=False))
    return any(id(parameter) in inside for parameter in outside)


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and local(tensor).numel() != tensor.numel()
