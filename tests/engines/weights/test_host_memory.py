"""Parameters that are freed, or move into common memory and out of it, on one rank; test_host_serving.py has more."""

import os

import pytest
import torch
from torch import nn

from lightrl.comm import Comm
from lightrl.engines.weights import host_memory
from lightrl.engines.weights.host_memory import drop_weights, is_mapped, map_together, move_apart, move_together


def joined() -> nn.ModuleDict:
    """Two layers side by side in one storage, [in, out], a norm in bfloat16, and a second name for the first layer."""
    model = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(3, 5, bias=False)})
    whole = torch.arange(21.0).view(3, 7).t()
    model["a"].weight.data, model["b"].weight.data = whole.split([2, 5])
    model["norm"] = nn.RMSNorm(9, dtype=torch.bfloat16)
    model["tied"] = model["a"]
    return model


def test_parameters_keep_their_values_and_their_neighbours() -> None:
    model = joined()
    named = dict(model.named_parameters(remove_duplicate=False))
    before = {name: (item.clone(), item.stride()) for name, item in named.items()}
    assert move_together(named, Comm())
    assert all(map(is_mapped, model.parameters()))
    assert all(torch.equal(named[name], value) for name, (value, _) in before.items())
    assert all(named[name].stride() == stride for name, (_, stride) in before.items())
    first, second = model["a"].weight, model["b"].weight
    assert second.data_ptr() - first.data_ptr() == 2 * 4  # two outputs of float32: the next columns
    assert model["norm"].weight.data_ptr() % 64 == 0
    assert move_apart(model.parameters())
    assert not any(map(is_mapped, model.parameters()))
    assert second.data_ptr() - first.data_ptr() == 2 * 4
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert not move_apart(model.parameters())


def test_parameters_do_not_overlap() -> None:
    many = {str(size): nn.Parameter(torch.full((size,), float(size))) for size in range(15, 19)}  # 64 bytes are 16
    assert move_together(many, Comm())
    assert all(bool((item == float(name)).all()) and len(item) == int(name) for name, item in many.items())


def test_weights_in_common_memory_are_dropped_after_they_left_it() -> None:
    model, calls = joined(), []
    assert move_together(dict(model.named_parameters()), Comm())
    dropped = drop_weights(
        model, lambda: calls.append([item.untyped_storage().nbytes() for item in model.parameters()])
    )
    assert len(calls) == 1
    assert min(calls[0]) > 0  # what reads the parameters finds them before they are emptied
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())
    assert move_together(dict(model.named_parameters()), Comm())  # empty ones, too
    for storage, size in dropped:
        storage.resize_(size)
    assert all(map(is_mapped, model.parameters()))
    drop_weights(joined(), lambda: calls.append([]))
    assert len(calls) == 1  # nothing to let go of


def refuse(*args) -> int:
    raise OSError("not permitted")


def test_parameters_stay_where_they_are_without_common_memory(monkeypatch) -> None:
    assert map_together(Comm(), 100).shape == (100,)
    monkeypatch.setattr(host_memory, "_mapped", lambda path, size: None)
    assert map_together(Comm(), 100) is None
    model = joined()
    assert not move_together(dict(model.named_parameters()), Comm())
    assert not any(map(is_mapped, model.parameters()))
    monkeypatch.undo()
    for name in ("memfd_create", "ftruncate"):  # not allowed, or beyond a limit
        with monkeypatch.context() as patched:
            patched.setattr(os, name, refuse)
            assert map_together(Comm(), 100) is None
    monkeypatch.delattr("os.memfd_create")
    assert map_together(Comm(), 100) is None


def test_another_size_or_a_lost_process_is_noticed(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    with monkeypatch.context() as patched:  # opening a device, for example, may already have an effect
        patched.setattr(host_memory, "open", lambda *_: pytest.fail("opened"), raising=False)
        assert host_memory._mapped(str(tmp_path / "file"), 11) is None
    assert host_memory._mapped(str(tmp_path / "none"), 11) is None
    assert host_memory._mapped(str(tmp_path / "file"), 10) is not None


def test_memory_goes_and_comes_back_under_the_same_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model.tied = model[0].weight
    parameters = list(model.parameters())
    dropped = drop_weights(model)
    assert sum(size for _, size in dropped) == 4 * (15 + 5 + 10 + 2)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in parameters)
    for storage, size in dropped:
        storage.resize_(size)
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(2.0)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad():
        assert float(model(torch.ones(1, 3))[0, 0]) == 5 * 2 * 8 + 2  # 3 * 2 + 2 = 8 in each of five
