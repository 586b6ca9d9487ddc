from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightrl.strategy.layout.dtensor import _is_first_holder, rows_of
from lightrl.strategy.layout.plain import Rows


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of 6 in a world that only looks like one."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=6)
    _is_first_holder.cache_clear()  # a process has one rank, but here its meshes are equal to those of other ranks
    yield request.param
    dist.destroy_process_group()
    _is_first_holder.cache_clear()


def sharded(rows: int, placements: list[Placement]) -> DTensor:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
    return torch.distributed.tensor.empty(rows, 4, device_mesh=mesh, placements=placements)


@pytest.mark.parametrize(
    ("rank", "wanted"),
    # 7 rows over 3 shards: 3, 3, 1; the second replica holds the same
    [(0, Rows(0, 3, True)), (2, Rows(6, 7, True)), (4, Rows(3, 6, False))],
    indirect=["rank"],
)
def test_rows_of_a_replicated_shard(rank: int, wanted: Rows) -> None:
    assert rows_of(sharded(7, [Replicate(), Shard(0)])) == wanted


@pytest.mark.parametrize("rank", [2], indirect=True)
def test_more_ranks_than_rows_and_other_layouts(rank: int) -> None:
    assert rows_of(sharded(2, [Replicate(), Shard(0)])) == Rows(2, 2, True)
    assert rows_of(sharded(6, [Replicate(), Shard(1)])) is None
    assert rows_of(sharded(6, [Shard(0), Shard(0)])) is None
    assert rows_of(sharded(6, [Replicate(), Replicate()])) is None
    assert rows_of(torch.empty(3)) is None


@pytest.mark.parametrize(
    ("rank", "wanted"),
    # 7 rows over 2 shards: 4, 3; ranks 3 and 5 hold the same rows, and their meshes are ranks 0, 3 and ranks 2, 5
    [(3, Rows(4, 7, True)), (5, Rows(4, 7, False))],
    indirect=["rank"],
)
def test_rows_of_what_tensor_parallelism_leaves_whole(rank: int, wanted: Rows) -> None:
    """Each of its ranks has a mesh of its own, with the same rows; if all wrote them, a hash would count them twice."""
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("shard", "tp"))["shard"]
    assert rows_of(torch.distributed.tensor.empty(7, 4, device_mesh=mesh, placements=[Shard(0)])) == wanted
