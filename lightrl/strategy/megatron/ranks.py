"""Ranks: megatron-core's groups of ranks that share a model, and one group of our own."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from lightrl.comm import Comm
from lightrl.strategy.megatron.parts import Place, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank's place in the layout and its groups."""

    sizes: Sizes
    place: Place
    sequence_parallel: bool
    replicas: dist.ProcessGroup  # ranks with the same part of all but the experts; they differ in samples or tokens
    expert_replicas: dist.ProcessGroup
    tensors: dist.ProcessGroup
    context: dist.ProcessGroup
    ends: dist.ProcessGroup | None  # the first and the last stage, which both hold a tied embedding
    same_batches: dist.ProcessGroup | None  # gloo: ranks that run the same micro-batches; None: this one alone

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.place.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output head."""
        return self.place.pp == self.sizes.pp - 1

    @property
    def reports(self) -> bool:
        """True on exactly one of the ranks that compute the same loss."""
        return self.is_last_stage and self.place.tp == 0 and self.place.cp == 0


def check_sizes(world: int, sizes: Sizes) -> None:
    """Raises ValueError unless the sizes fit into the world."""
    dense, experts = sizes.tp * sizes.pp * sizes.cp, sizes.etp * sizes.ep * sizes.pp
    if world % dense:
        raise ValueError(
            f"--tp_size {sizes.tp} x --megatron.pp_size {sizes.pp} x --megatron.cp_size {sizes.cp} = {dense} does not "
            f"divide {world} ranks. Valid products: {_divisors(world)}."
        )
    if world % experts:
        raise ValueError(
            f"--megatron.ep_size {sizes.ep} x --megatron.etp_size {sizes.etp} x --megatron.pp_size {sizes.pp} = "
            f"{experts} does not divide {world} ranks. Valid products: {_divisors(world)}."
        )


def _divisors(world: int) -> str:
    return ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)


def join_groups(comm: Comm, sizes: Sizes, *, sequence_parallel: bool, seed: int) -> Ranks:
    """Builds the groups; every rank must call it, once per layout in a process."""
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        distributed_timeout_minutes=max(1, int(comm.timeout.total_seconds() // 60)),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)
    place = Place(
        tp=state.get_tensor_model_parallel_rank(),
        pp=state.get_pipeline_model_parallel_rank(),
        cp=state.get_context_parallel_rank(),
        ep=state.get_expert_model_parallel_rank(),
        etp=state.get_expert_tensor_parallel_rank(),
    )
    return Ranks(
        sizes=sizes,
        place=place,
        sequence_parallel=sequence_parallel,
        replicas=state.get_data_parallel_group(with_context_parallel=True),
        expert_replicas=state.get_expert_data_parallel_group(),
        tensors=state.get_tensor_model_parallel_group(),
        context=state.get_context_parallel_group(),
        ends=state.get_embedding_group(check_initialized=False) if sizes.pp > 1 else None,
        same_batches=_same_batches(comm, state.get_data_parallel_rank()),
    )


def _same_batches(comm: Comm, data_rank: int) -> dist.ProcessGroup | None:
    """Builds the groups of ranks that share micro-batches: all stages and parts of one replica of a model."""
    replicas: dict[int, list[int]] = {}
    for rank, replica in enumerate(comm.all_gather_object(data_rank)):
        replicas.setdefault(replica, []).append(rank)
    mine: dist.ProcessGroup | None = None
    for replica in sorted(replicas):  # every rank must make every group, or new_group hangs
        if len(replicas[replica]) > 1:
            group = dist.new_group(replicas[replica], timeout=comm.timeout, backend="gloo")
            mine = group if replica == data_rank else mine
    return mine
