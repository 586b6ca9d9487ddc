from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightrl.strategy.layout.dtensor import rows_of
from lightrl.strategy.layout.plain import Rows


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of 6 in a world that only looks like one."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=6)
    yield request.param
    dist.destroy_process_group()


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
