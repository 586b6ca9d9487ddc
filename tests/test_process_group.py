import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightrl import process_group
from lightrl.comm import RankError, known_world
from lightrl.process_group import (
    EnvironmentVariableError,
    backend_for,
    check_environment,
    is_lost_peer,
    join,
    store_of,
)
from lightrl.testing import free_port, run_program, run_spmd

UNCLOSED = Path(__file__).parent / "programs" / "unclosed_program.py"


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
    monkeypatch.setenv("RANK", "1")
    check_environment()
    for port in ("0", "70000"):  # torchrun --master_port 0 passes the 0 on, and a rank would wait there for ever
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ValueError, match=f"MASTER_PORT is {port}: it must be 1 to 65535. torchrun --standalone"):
            check_environment()
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert known_world() == 1  # whoever joins is told below
    with pytest.raises(ValueError, match="WORLD_SIZE is 'two': it must be a whole number"):
        check_environment()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/allreduce.cc:48] Invalid scalar type"), False),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited"), True),
        (dist.DistNetworkError("The client socket has timed out after 6000ms"), True),
        (RuntimeError("the reward's server timed out"), False),
        (RuntimeError("NCCL is not what the answer is about"), False),
        (TimeoutError("timed out"), False),
        (RankError("rank 0 gave up: [/pytorch/third_party/gloo/gloo/x.cc:1] Timed out"), False),  # it explains already
    ],
)
def test_only_errors_of_a_process_group_tell_of_a_lost_rank(error: Exception, is_lost: bool) -> None:
    assert is_lost_peer(error) is is_lost


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


@pytest.mark.parametrize(("kept", "meets"), [("False", True), ("True", False)])
def test_ranks_that_have_counted_other_restarts_meet_in_a_new_store(
    kept: str, meets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", kept)
    monkeypatch.setattr(process_group, "_meeting", HashStore())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    store_of("trainer").set("address", "here")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # of the agent on a node that has replaced another
    assert store_of("trainer").check(["address"]) is meets


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no priority to give gloo's threads")
def test_a_program_that_closes_nothing_ends_well() -> None:
    """Unless the group is destroyed, most of these runs end by SIGABRT: 'terminate called' in a thread of gloo."""
    for _ in range(3):
        assert run_spmd(UNCLOSED, world_size=2, timeout_s=60).count("is done") == 2


@pytest.mark.parametrize(("open_groups", "failed", "destroyed"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_an_open_group_is_destroyed_at_exit_unless_the_program_failed(
    open_groups: bool, failed: bool, destroyed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: open_groups)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(None))
    if failed:  # as Python notes an error that nothing caught
        monkeypatch.setattr(sys, "last_type", KeyError, raising=False)
    else:
        monkeypatch.delattr(sys, "last_type", raising=False)
    process_group._leave(os.getpid())
    assert len(calls) == destroyed


@pytest.mark.parametrize(
    ("error", "world"),
    [
        (dist.DistNetworkError("The server socket has failed to listen. code: -98, name: EADDRINUSE"), "2"),
        (dist.DistStoreError("timed out"), "1"),
        (RuntimeError("timed out"), "2"),
    ],
)
def test_other_errors_are_not_laid_to_ranks_that_never_joined(
    error: Exception, world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert process_group.why_not_joined(error) == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_others_never_join_says_so(rank: int, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "scripts" / "train_grpo.py"
    command = [sys.executable, str(script), "--distributed.timeout_s", "2", "--output_dir", str(tmp_path / "run")]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {"RANK": str(rank), "WORLD_SIZE": "2", **address}
    said = run_program(command, timeout_s=100, env=env, expect_failure=True)
    assert said.rstrip().splitlines()[-1] == (
        "Not all 2 ranks have joined within --distributed.timeout_s: one has failed, was not started, or cannot reach "
        "127.0.0.1 (MASTER_ADDR). Look at the output of the other ranks."
    )
