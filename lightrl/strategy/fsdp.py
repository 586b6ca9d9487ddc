"""FSDP2: every parameter sharded over the ranks (or over the ranks of a replica), gathered block by block.

Consecutive ranks may also split every weight matrix (tensor parallelism), and groups of ranks may split the tokens of
a micro-batch (sequence parallelism). Such ranks together run the micro-batches of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from lightrl.models.per_sequence import RUNS_APART
from lightrl.models.router_biases import router_biases
from lightrl.records import PackedBatch
from lightrl.strategy.computation import autocast_beside_matrix_buffers, enable_gradient_checkpointing
from lightrl.strategy.layout.host_layout import HostLayout
from lightrl.strategy.layout.materialize import move_buffers, to_meta
from lightrl.strategy.layout.meshes import Meshes, MeshSizes, build_meshes, ensure_process_group
from lightrl.strategy.layout.sequence_parallel import UlyssesGroup
from lightrl.strategy.layout.tensor_parallel import check_splits, cut_projections
from lightrl.strategy.layout.used_parameters import UsedParameters
from lightrl.strategy.results import GroupBatches
from lightrl.strategy.serving.host_serving import HostServing
from lightrl.strategy.torch_native import TorchStrategy


class FSDPStrategy(TorchStrategy):
    """Shards each transformer block as a unit and the rest (tied embeddings included) in the root unit."""

    steps_whole_matrices = False
    splits_models = True
    meshes: Meshes
    layout: HostLayout
    _same_batches: dist.ProcessGroup | None = None  # ranks that run the same micro-batches, if any

    def __init__(
        self, seed: int, max_norm: float, micro_train_batch_size: int, train_batch_size: int, args: Any | None = None
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        self._used: dict[nn.Module, UsedParameters] = {}  # of the models that train
        if not self.options.offload_while_generating:
            self.serving = HostServing(self, self.options, lambda: self.layout)

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        """Joins the world that torchrun describes and builds the device meshes."""
        super().setup_distributed(timeout, num_gpu_per_node)
        self.comm = ensure_process_group(self.comm, self.device)
        options = self.options
        sizes = MeshSizes(replicas=options.fsdp.replicate_size, tokens=options.sp_size, tensors=options.tp_size)
        self.meshes = build_meshes(self.device, self.comm.world, sizes)
        self._same_batches = self.comm.new_groups(sizes.tokens * sizes.tensors)
        self.layout = HostLayout(
            self.comm,
            device=self.device,
            bucket_bytes=options.sync_bucket_mb << 20,
            replica=self.meshes.rest.get_group("shard"),
        )

    def check_model_config(self, config: Any) -> None:
        """Raises ValueError for a model that --tp_size or --sp_size cannot split."""
        check_splits(config, tp_size=self.options.tp_size, sp_size=self.options.sp_size)

    @property
    def averaging_ranks(self) -> int:
        """The number of ranks, those of tensor parallelism counted once because their gradients are equal."""
        return self.comm.world // self.options.tp_size

    @property
    def gradient_parts(self) -> int:
        """The number of ranks that split the tokens of a micro-batch."""
        return self.options.sp_size

    @property
    def materializes_weights(self) -> bool:
        """Only rank 0 loads weights; the others receive their shards."""
        return self.comm.is_main

    # ---- Placing a model ---------------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Shards rank 0's weights over all ranks; on the other ranks, the model may be on the meta device."""
        if self.options.gradient_checkpointing:
            enable_gradient_checkpointing(self.unwrap_model(model))
        source = {name: tensor.detach() for name, tensor in _named_tensors(model)} if self.comm.is_main else {}
        self._split(model)
        settings = self._sharding(model)
        if self.options.dtype == "bfloat16":
            self._shard_float32_parts(model, settings)
            autocast_beside_matrix_buffers(model, self.device)
        for block in reversed(transformer_blocks(model)):  # blocks inside blocks first
            fully_shard(block, mesh=self.meshes.block, **settings)
        # The backward begins with the root unit. Without a backward, after_forward_only() shards it.
        fully_shard(model, mesh=self.meshes.rest, **{**settings, "reshard_after_forward": False})
        model.to_empty(device="cpu" if self.options.fsdp.cpu_offload else self.device)
        move_buffers(model, self.device)  # even with --fsdp.cpu_offload, as they are used with activations
        for bias in router_biases(model).values():
            bias.data = bias.data.to(self.device)
        for name, tensor in _named_tensors(model):
            self._fill_from_main(tensor, source.pop(name, None))
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._used[model] = UsedParameters(model)
        return model

    def _shard_float32_parts(self, model: nn.Module, settings: dict[str, Any]) -> None:
        """Makes units of modules that compute in float32, such as a value head, so that no weight is rounded."""
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=settings["mp_policy"].reduce_dtype)
        for module in model.modules():
            if getattr(module, "computes_in_float32", False):
                fully_shard(module, mesh=self.meshes.rest, **{**settings, "mp_policy": policy})

    def _split(self, model: nn.Module) -> None:
        """Reduces the model to this rank's part, on the meta device, if ranks split models or tokens."""
        if self._same_batches is None:
            return
        inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if inner is None or not hasattr(model, "sequence_group"):
            raise ValueError(
                f"--tp_size and --sp_size split lightrl's Policy, Critic and RewardModel, not {type(model).__name__}. "
                "Leave both at 1."
            )
        self.check_model_config(inner.config)
        if self.meshes.tensors is not None:
            to_meta(model)
            cut_projections(inner.get_decoder(), self.meshes.tensors)
        if self.meshes.tokens is not None:
            splittable: Any = model
            splittable.sequence_group = UlyssesGroup(self.meshes.tokens.get_group())
        model.register_forward_pre_hook(self._require_same_batch)

    def _sharding(self, model: nn.Module) -> dict[str, Any]:
        fsdp = self.options.fsdp
        compute = torch.bfloat16 if self.options.dtype == "bfloat16" else None
        reduce = torch.bfloat16 if fsdp.reduce_dtype == "bfloat16" else torch.float32
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if fsdp.cpu_offload else OffloadPolicy()
        return {
            "reshard_after_forward": fsdp.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce),
            "offload_policy": offload,
            "ignored_params": set(router_biases(model).values()),  # whole on every rank, because gathering rounds
        }

    @torch.no_grad()
    def _fill_from_main(self, tensor: Tensor, source: Tensor | None) -> None:
        """Copies rank 0's values tensor by tensor, so that a rank holds at most its shards and one whole tensor."""
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if source is not None:
            whole.copy_(source)
        self.comm.broadcast_tensor(whole)
        self.layout.write_whole(tensor, whole)

    # ---- Training ----------------------------------------------------------------------------------------------

    def group_batches(self, data: Sequence[Any]) -> GroupBatches:
        """Exchanges micro-batches with the ranks that share a model or its tokens with this one."""
        if self._same_batches is None:
            return super().group_batches(data)
        return GroupBatches.of_group(data, self.comm, self._same_batches, self.device)

    def _require_same_batch(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Raises ValueError if ranks would compute with parts of different inputs, or hang."""
        summary = tuple(_summary(item) for item in args)
        if len(set(self.comm.all_gather_object(summary, self._same_batches))) > 1:
            raise ValueError(
                f"Ranks that --tp_size {self.options.tp_size} and --sp_size {self.options.sp_size} join called the "
                "model on different micro-batches. Use strategy.train_batch or strategy.forward, or call the model on "
                "each of strategy.group_batches(micro_batches).batches."
            )

    def before_micro_batch(self, model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Lets FSDP reduce gradients in the last micro-batch only, unless the options ask for each."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last_micro_batch or self.options.fsdp.reduce_each_micro_batch)
        return nullcontext()

    def run_backward(self, loss: Tensor, model: nn.Module) -> None:
        """Runs the backward, which leaves out units that have never run."""
        if model in self._used:
            self._used[model].leave_out_idle_units()
        super().run_backward(loss, model)

    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        """Drops gradients of parameters that no rank used; the backward has reduced the others."""
        if model in self._used:
            self._used[model].drop_unused(parameters, self.comm)

    def after_forward_only(self, model: nn.Module) -> None:
        """Shards all units again that stay gathered after a forward, such as the root unit."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _summary(batch: Any) -> tuple[Any, ...] | None:
    """Returns a value in which two micro-batches differ; None for an argument that is no pack."""
    if not isinstance(batch, PackedBatch):
        return None
    return batch.keys, batch.cu_seqlens, int(batch.input_ids.sum())


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns parameters and all buffers, even non-persistent ones, since to_empty leaves garbage in all of them.

    One that several modules share is returned under each name, since to_empty makes one for each.
    """
    return [*sorted(model.named_parameters()), *sorted(model.named_buffers(remove_duplicate=False))]


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the layers to shard one by one: those that transformers never splits, or else members of ModuleLists."""
    names = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    # Layers that run once for each sequence would be gathered a different number of times on each rank.
    blocks: list[nn.Module] = [
        m for m in model.modules() if RUNS_APART in m.__dict__ and isinstance(m, PreTrainedModel)
    ]
    blocks = blocks or [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        # An expert runs only on ranks with a token for it, and the others would not join in gathering it.
        blocks = [module for name, group in named if "expert" not in name for module in group]
    blocks = [block for block in blocks if not isinstance(block, nn.ModuleList | nn.ModuleDict)]  # they have no forward
    return [block for block in blocks if block is not model and not _shares_parameters(block, model)]


def _shares_parameters(block: nn.Module, model: nn.Module) -> bool:
    """Returns whether a block shares a tied weight, so that it must stay in the root unit."""
    inside = {id(parameter) for parameter in block.parameters()}
    owned = set(block.modules())
    outside = (p for module in model.modules() if module not in owned for p in module.parameters(recurse=False))
    return any(id(parameter) in inside for parameter in outside)
