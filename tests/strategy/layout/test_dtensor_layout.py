"""Where a rank's values of a cut tensor lie, and the whole from all of them."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightrl.strategy.layout.dtensor import Sharding, sharding_of


def of_rank(shard: int, part: int, part_dim: int) -> Sharding:
    return Sharding(num_shards=2, shard=shard, num_parts=2, part=part, part_dim=part_dim)


def padded(tensor: Tensor, num_elements: int) -> Tensor:
    flat = tensor.reshape(-1)
    return torch.cat([flat, flat.new_full((num_elements - len(flat),), -1)])


def test_parts_of_columns_by_hand() -> None:
    # 3 rows of 4 columns: the parts are columns 0-1 and 2-3, the shards of each rows 0-1 and row 2.
    whole = torch.arange(12).view(3, 4)
    assert of_rank(0, 0, 1).cut(whole).tolist() == [[0, 1], [4, 5]]
    assert of_rank(0, 1, 1).cut(whole).tolist() == [[2, 3], [6, 7]]
    assert of_rank(1, 1, 1).cut(whole).tolist() == [[10, 11]]


def test_parts_of_rows_by_hand() -> None:
    # 6 rows: the parts are rows 0-2 and 3-5, the shards of the second rows 3-4 and row 5.
    whole = torch.arange(6)[:, None]
    assert of_rank(0, 1, 0).cut(whole).tolist() == [[3], [4]]
    assert of_rank(1, 1, 0).cut(whole).tolist() == [[5]]


@pytest.mark.parametrize("shape", [(6, 4), (10, 2), (2, 6), (4,)])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("part_dim", [0, 1])
def test_join_restores_what_cut_took(shape: tuple[int, ...], num_shards: int, part_dim: int) -> None:
    """Also where the last shards are short or empty; the padding is nowhere in the result."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    dim = min(part_dim, len(shape) - 1)
    ranks = [
        Sharding(num_shards=num_shards, shard=shard, num_parts=2, part=part, part_dim=dim)
        for shard in range(num_shards)
        for part in range(2)
    ]
    length = ranks[0].cut(whole).numel()
    shards = torch.stack([padded(rank.cut(whole), length) for rank in ranks])
    assert torch.equal(ranks[0].join(shards, whole.shape), whole)


@pytest.mark.parametrize("whole", [torch.arange(3.0), torch.arange(12.0).view(3, 4), torch.ones(1)])
def test_the_result_of_a_join_is_contiguous_even_with_one_row_a_rank(whole: torch.Tensor) -> None:
    rows = torch.zeros(3, 20)  # transformers saves no view into such a bucket
    shards = rows[:, 8 : 8 + whole[0].numel()]
    shards[: len(whole)] = whole.reshape(len(whole), -1)
    joined = Sharding(num_shards=3, shard=0).join(shards, whole.shape)
    assert torch.equal(joined, whole)
    joined.view(-1)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of 4 in a world that only looks like one."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


def sharded(placements: list[Placement], axes: tuple[str, str] = ("shard", "tp")) -> DTensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    return DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False)


@pytest.mark.parametrize("rank", [3], indirect=True)
def test_layouts_of_fsdp_and_tensor_parallelism(rank: int) -> None:
    both = Sharding(num_shards=2, shard=1, num_parts=2, part=1, part_dim=0)
    assert sharding_of(sharded([_StridedShard(0, split_factor=2), Shard(0)])) == both
    assert sharding_of(sharded([Shard(0), Shard(1)])) == Sharding(
        num_shards=2, shard=1, num_parts=2, part=1, part_dim=1
    )
    rows = Sharding(num_shards=2, shard=1)
    assert sharding_of(sharded([Shard(0), Replicate()])) == rows
    assert sharding_of(sharded([Replicate(), Shard(0)], ("replicate", "shard"))) == rows
    assert sharding_of(sharded([Shard(0), Shard(0)], ("replicate", "shard"))) is None
    assert sharding_of(sharded([Shard(1), Replicate()])) is None
