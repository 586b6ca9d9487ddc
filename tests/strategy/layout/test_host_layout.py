"""Gathers into common memory, with one rank; test_host_serving.py has several."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightrl.comm import Comm
from lightrl.engines.weights.fingerprint import fingerprint
from lightrl.strategy.layout.host_layout import HostLayout


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def test_rows_are_written_where_they_fit_and_gathered_elsewhere(mesh: DeviceMesh) -> None:
    layout = HostLayout(Comm(), device=torch.device("cpu"))
    values = torch.arange(12.0).view(4, 3)
    rows = distribute_tensor(values, mesh, [Shard(0)])
    named = [
        ("columns", distribute_tensor(values, mesh, [Shard(1)])),
        ("misshapen", rows),
        ("replicated", distribute_tensor(values, mesh, [Replicate()])),
        ("rows", rows),
        ("turned", rows),
        ("unknown", rows),
        ("whole", values),
    ]
    places = {name: torch.zeros(4, 3) for name, _ in named if name != "unknown"}
    places["misshapen"] = torch.zeros(3, 4)
    places["turned"] = torch.zeros(3, 4).t()
    with layout.writing_to(places) as memory:
        gathered = dict(layout.gather_named(named))
    assert memory.written == {"rows", "turned"}
    assert memory.found == dict.fromkeys(memory.written, fingerprint(values))
    for name, _ in named:
        assert torch.equal(gathered[name], values)
        assert (gathered[name] is places.get(name)) == (name in memory.written)
    after: list[Tensor] = [tensor for _, tensor in layout.gather_named([("rows", rows * 2)])]
    assert torch.equal(after[0], values * 2)
    assert torch.equal(places["rows"], values)  # outside of the context nothing is written there


def test_two_names_of_one_place_are_not_both_written_there(mesh: DeviceMesh) -> None:
    layout = HostLayout(Comm(), device=torch.device("cpu"))
    values = torch.arange(12.0).view(4, 3)
    first, second = (distribute_tensor(item, mesh, [Shard(0)]) for item in (values, values + 1))
    place = torch.zeros(4, 3)
    with layout.writing_to({"first": place, "second": place}) as memory:
        gathered = layout.gather_named([("first", first), ("second", second)])
        assert next(gathered) == ("first", place)
        ((name, whole),) = gathered  # which the engine loads and compares with what it has loaded before
    assert memory.written == {"first"}
    assert torch.equal(place, values)
    assert (name, whole.tolist()) == ("second", (values + 1).tolist())


def test_values_are_rounded_as_a_gather_rounds_them(mesh: DeviceMesh) -> None:
    layout = HostLayout(Comm(), device=torch.device("cpu"))
    rows = distribute_tensor(torch.rand(5, 7), mesh, [Shard(0)])
    places = {"fits": torch.zeros(5, 7, dtype=torch.bfloat16), "float": torch.zeros(5, 7)}
    with layout.writing_to(places) as memory:
        gathered = dict(layout.gather_named([("fits", rows), ("float", rows)], torch.bfloat16))
    assert memory.written == {"fits"}
    assert torch.equal(gathered["fits"], rows.full_tensor().bfloat16())
    assert gathered["float"].dtype == torch.bfloat16
