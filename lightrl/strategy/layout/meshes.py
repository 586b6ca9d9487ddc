"""Device meshes: the ranks as grids of replicas x shards x ranks that split tokens x ranks that split tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightrl.comm import Comm, RankComm
from lightrl.process_group import backend_for
from lightrl.strategy.layout.dtensor import TENSOR_AXIS


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """The sizes that the options ask for; sharding uses the remaining factor of the world size."""

    replicas: int
    tokens: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The meshes of FSDP, tensor parallelism and sequence parallelism, with named axes.

    Ranks that split tokens have gradients of different tokens, like ranks with different micro-batches, so FSDP treats
    both alike. Parameters that tensor parallelism leaves whole are sharded over its ranks too.
    """

    block: DeviceMesh  # (replicate,) shard: the mesh that a transformer block is sharded over
    rest: DeviceMesh  # the same for parameters outside of all blocks, mainly the embeddings
    tensors: DeviceMesh | None  # consecutive ranks
    tokens: DeviceMesh | None


def build_meshes(device: torch.device, world: int, sizes: MeshSizes) -> Meshes:
    """Builds all meshes; every rank must call it."""
    check_mesh(world, sizes)
    rest = _mesh(device, {"replicate": sizes.replicas, "shard": world // sizes.replicas})
    block, tensors, tokens = rest, None, None
    if sizes.tensors > 1:
        num_shards = world // (sizes.replicas * sizes.tensors)
        grid = _mesh(device, {"replicate": sizes.replicas, "shard": num_shards, TENSOR_AXIS: sizes.tensors})
        block = grid["shard"] if sizes.replicas == 1 else grid["replicate", "shard"]
        tensors = grid[TENSOR_AXIS]
        grid["shard", TENSOR_AXIS]._flatten()  # the norm of gradients then takes one reduction, not one per axis
    if sizes.tokens > 1:
        num_groups = world // (sizes.tokens * sizes.tensors)
        axes = {"group": num_groups, "tokens": sizes.tokens, "part": sizes.tensors}
        tokens = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))["tokens"]
    return Meshes(block=block, rest=rest, tensors=tensors, tokens=tokens)


def check_mesh(world: int, sizes: MeshSizes) -> None:
    """Raises ValueError unless the sizes fit into the world."""
    product = sizes.replicas * sizes.tokens * sizes.tensors
    if world % product == 0:
        return
    valid = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
    raise ValueError(
        f"--fsdp.replicate_size {sizes.replicas} x --sp_size {sizes.tokens} x --tp_size {sizes.tensors} = {product} "
        f"does not divide {world} ranks. Valid products: {valid}."
    )


def _mesh(device: torch.device, axes: dict[str, int]) -> DeviceMesh:
    """Builds a mesh that has no replicate axis for a single replica: FSDP would take it for hybrid sharding."""
    kept = {name: size for name, size in axes.items() if name != "replicate" or size > 1}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def ensure_process_group(comm: Comm, device: torch.device) -> Comm:
    """Returns a Comm with a process group, for back ends that need one even in a single process."""
    if dist.is_initialized():
        return comm
    dist.init_process_group(backend_for(device), store=HashStore(), rank=0, world_size=1)
    return RankComm(device=device, owns_group=True)
