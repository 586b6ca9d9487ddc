from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightrl import process_group
from lightrl.comm import known_world
from lightrl.process_group import EnvironmentVariableError, backend_for, check_environment, join


def test_variables_that_describe_no_rank_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert known_world() == 2
    with pytest.raises(EnvironmentVariableError, match="missing for a distributed run: RANK, MASTER_ADDR, MASTER_PORT"):
        check_environment()
    for name, value in (("RANK", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="RANK is 2: with WORLD_SIZE 2 it must be 0 to 1"):
        check_environment()
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert known_world() == 1  # whoever joins is told below
    with pytest.raises(ValueError, match="WORLD_SIZE is 'two': it must be a whole number"):
        check_environment()


def test_a_gpu_needs_both_back_ends() -> None:
    assert (backend_for(torch.device("cpu")), backend_for(torch.device("cuda"))) == ("gloo", "cpu:gloo,cuda:nccl")


def test_a_group_is_bound_to_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch makes the groups of meshes by splitting it, which crashes with two back ends."""
    given: dict[str, Any] = {}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 1)]))
    monkeypatch.setattr(process_group, "_meeting", None)
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options, backend=backend))
    join(torch.device("cuda", 1), timedelta(seconds=5))
    assert given.pop("store") is not None
    assert given == {"backend": "cpu:gloo,cuda:nccl", "rank": 0, "world_size": 1, "timeout": timedelta(seconds=5)}
