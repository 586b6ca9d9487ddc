"""The arithmetic of ZeRO-3's shards, without DeepSpeed."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lightrl.strategy.layout.zero import (
    DataclassOutputs,
    ParametersToPartition,
    is_partitioned,
    own_shard,
    write_whole,
)


def partitioned(total: int, size: int, kept_whole: bool = False) -> nn.Parameter:
    """As a rank sees it: a shard of `size`, the last ranks' padded."""
    parameter = nn.Parameter(torch.zeros(total if kept_whole else 0))
    parameter.ds_tensor, parameter.ds_numel = torch.full((size,), -1.0), total  # type: ignore[attr-defined]
    return parameter


@pytest.mark.parametrize(
    ("rank", "expected"),
    # 5 elements over 4 ranks: shards of 2, so rank 2 holds one element and padding, and rank 3 padding alone
    [(0, [10.0, 11.0]), (1, [12.0, 13.0]), (2, [14.0]), (3, [])],
)
def test_each_rank_holds_its_part_without_the_padding(rank: int, expected: list[float]) -> None:
    parameter = partitioned(total=5, size=2)
    assert is_partitioned(parameter)
    write_whole(parameter, torch.arange(10.0, 15.0), rank)
    assert own_shard(parameter, rank).tolist() == expected
    assert parameter.ds_tensor.tolist() == expected + [-1.0] * (2 - len(expected))  # the padding is left alone
    assert parameter.data.numel() == 0


def test_a_parameter_that_is_kept_whole_is_written_whole_too() -> None:
    parameter = partitioned(total=3, size=2, kept_whole=True)
    write_whole(parameter, torch.tensor([1.0, 2.0, 3.0]), rank=1)
    assert own_shard(parameter, 1).tolist() == [3.0]
    assert parameter.data.tolist() == [1.0, 2.0, 3.0]


def test_a_tied_parameter_on_the_meta_device_becomes_real_once() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    model["embed"].weight.requires_grad_(False)
    found = list(ParametersToPartition(model, torch.device("cpu")).parameters())
    assert len(found) == 1
    assert model["head"].weight is model["embed"].weight is found[0]
    assert found[0].device.type == "cpu"
    assert not found[0].requires_grad


@dataclass(frozen=True, slots=True)
class Pair:
    first: Tensor
    second: Tensor


class MakesPairs(nn.Module):
    def forward(self, value: Tensor) -> Pair:
        return Pair(value, 2 * value)


def test_hooks_see_a_tuple_and_the_caller_the_dataclass() -> None:
    model = MakesPairs()
    outputs = DataclassOutputs(model)
    seen: list[object] = []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    model.register_forward_hook(outputs.restore)
    result = model(torch.ones(1))
    assert isinstance(seen[0], tuple)
    assert isinstance(result, Pair)
    assert_close(result.second, torch.tensor([2.0]))
    plain = nn.Identity()
    plain.register_forward_hook(DataclassOutputs(plain).restore)
    assert_close(plain(torch.ones(1)), torch.ones(1))
