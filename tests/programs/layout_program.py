"""Run on 2 ranks: a DTensorLayout without a strategy, for several ways of sharding."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightrl import comm as comm_module
from lightrl.engines.weights.fingerprint import fingerprint_of
from lightrl.strategy.layout.dtensor import DTensorLayout
from lightrl.strategy.layout.plain import NamedShard, PlainLayout

WHOLE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


class Saved:
    """A checkpoint that holds one tensor, and counts the rows that are read."""

    names = frozenset({"weight"})

    def __init__(self) -> None:
        self.num_rows = 0

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        self.num_rows += stop - start
        return WHOLE[start:stop]

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, len(WHOLE))


def check(layout: PlainLayout, parameter: nn.Parameter) -> None:
    """What a layout writes it reads back, whatever the sharding of the parameter, which is [3, 2]."""
    layout.write_whole(layout.detached(parameter), WHOLE)
    assert torch.equal(layout.gather(layout.detached(parameter)), WHOLE)
    assert not layout.gather(layout.detached(parameter)).requires_grad
    assert torch.equal(layout.shard(parameter), layout.shard_of_whole(parameter, WHOLE))
    assert layout.whole_shape(parameter) == WHOLE.shape
    assert torch.equal(layout.gather(layout.add(parameter, 10 * WHOLE)), 11 * WHOLE)
    assert torch.equal(layout.gather(layout.detached(parameter)), WHOLE)  # add made a copy
    own = layout.shard(parameter).clone()
    shards = [NamedShard("weight", parameter, own)]
    alone = PlainLayout(comm_module.Comm())
    expected = alone.fingerprints([NamedShard("weight", nn.Parameter(WHOLE), WHOLE)], None)
    assert fingerprint_of(layout.fingerprints(shards, None)["weight"]) == fingerprint_of(expected["weight"])
    with torch.no_grad():
        parameter.zero_()
    layout.write_shard(parameter, own)
    assert torch.equal(layout.gather(layout.detached(parameter)), WHOLE)
    with torch.no_grad():
        parameter.zero_()
    saved = Saved()
    layout.read_into(layout.detached(parameter), saved, "weight")
    assert torch.equal(layout.gather(layout.detached(parameter)), WHOLE)
    rows = layout.rows(layout.detached(parameter))
    assert saved.num_rows == (3 if rows is None else rows.stop - rows.start)


def main() -> None:
    device = torch.device("cpu")
    comm = comm_module.connect(device, timedelta(seconds=60))
    layout = DTensorLayout(comm, device=device, bucket_bytes=16)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    empty = torch.zeros(3, 2)
    for placement, is_first in ((Shard(0), True), (Shard(1), True), (Replicate(), comm.is_main)):
        parameter = nn.Parameter(distribute_tensor(empty, mesh, [placement]))
        check(layout, parameter)
        assert layout.is_first_holder(parameter) == is_first
    plain = nn.Parameter(empty.clone())
    check(layout, plain)
    assert (layout.is_first_holder(plain), layout.is_whole(plain)) == (comm.is_main, True)
    named = [(str(index), distribute_tensor(WHOLE + index, mesh, [Shard(0)])) for index in range(5)]
    found = dict(layout.gather_named(named, torch.float64))  # several buckets
    assert all(torch.equal(found[str(index)], (WHOLE + index).double()) for index in range(5))
    comm.close()
    sys.stdout.write("all checked\n")


if __name__ == "__main__":
    main()
