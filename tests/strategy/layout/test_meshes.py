"""Which ranks split what with whom."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightrl.strategy.layout.meshes import MeshSizes, build_meshes, check_mesh

CPU = torch.device("cpu")


@pytest.fixture
def world() -> Iterator[int]:
    """Rank 5 of 8."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield 8
    dist.destroy_process_group()


def ranks_of(mesh: DeviceMesh | None) -> list[int]:
    assert mesh is not None
    found: list[int] = mesh.mesh.flatten().tolist()
    return found


def test_tensors_are_split_by_neighbours_and_tokens_by_every_second_rank(world: int) -> None:
    # rank = (shard x 2 + token share) x 2 + part: 5 = (1 x 2 + 0) x 2 + 1
    meshes = build_meshes(CPU, world, MeshSizes(replicas=1, tokens=2, tensors=2))
    assert ranks_of(meshes.tensors) == [4, 5]
    assert ranks_of(meshes.tokens) == [5, 7]
    assert ranks_of(meshes.block) == [1, 3, 5, 7]
    assert ranks_of(meshes.rest) == list(range(8))
    assert meshes.block.mesh_dim_names == meshes.rest.mesh_dim_names == ("shard",)


def test_replicas_are_outermost(world: int) -> None:
    meshes = build_meshes(CPU, world, MeshSizes(replicas=2, tokens=1, tensors=2))
    assert meshes.block.mesh.tolist() == [[1, 3], [5, 7]]  # (replicate, shard)
    assert meshes.rest.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert meshes.tokens is None


def test_one_mesh_where_nothing_is_split(world: int) -> None:
    meshes = build_meshes(CPU, world, MeshSizes(replicas=1, tokens=1, tensors=1))
    assert meshes.block is meshes.rest
    assert (meshes.tensors, meshes.tokens) == (None, None)


def test_sizes_that_do_not_fit_are_told_with_those_that_do() -> None:
    # 1 x 2 x 3 = 6
    with pytest.raises(ValueError, match=r"--sp_size 2 x --tp_size 3 = 6 does not divide 8 ranks.*1, 2, 4, 8"):
        check_mesh(8, MeshSizes(replicas=1, tokens=2, tensors=3))
    with pytest.raises(ValueError, match="--fsdp.replicate_size 3 x --sp_size 2 x --tp_size 1 = 6 does not divide 8"):
        check_mesh(8, MeshSizes(replicas=3, tokens=2, tensors=1))
