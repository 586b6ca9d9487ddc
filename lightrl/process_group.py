"""The process group of torch.distributed, made from what torchrun says in environment variables."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from lightrl.forked import end_child

_LINK_WATCH = timedelta(days=365)  # time-out of a receive that is to end only when the peer does

_PEER_LOST = (
    "Connection closed",
    "Connection reset",
    "Timed out",
    "timed out",
    "NCCL",
    "Broken pipe",
    "pair closure",  # Gloo's connections are closed once a collective has timed out
    "Socket Timeout",
)
_OF_GLOO = ("/gloo/", "Application timeout caused pair closure")  # its errors name the line of its source, but for one

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_role = ""  # role of this rank if the run splits its ranks into several worlds
_meeting: Store | None = None  # store of all ranks that torchrun started
_joins = itertools.count()  # a program may leave its process group and join again: the store keeps the old addresses


class EnvironmentVariableError(ValueError, RuntimeError):
    """The environment variables describe no rank of a world; also a RuntimeError for code that expects one."""


def join(device: torch.device, timeout: timedelta) -> Store:
    """Makes the process group of the ranks that torchrun started; returns the store that they share."""
    global _meeting
    check_environment()
    # Sub-groups of a device mesh take this default and would otherwise wait 30 minutes whatever was asked.
    dist.distributed_c10d.default_pg_timeout = timeout
    meeting = rendezvous("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout=timeout)
    store, rank, world = next(iter(meeting))
    store.set_timeout(timeout)
    _meeting = PrefixStore(f"join_{next(_joins)}", store)
    store = store_of(_role)
    # No device_id: torch would split this group into those of meshes, which fails up to torch 2.13 in the second world
    # of a process: https://github.com/pytorch/pytorch/pull/192109
    dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=world, timeout=timeout)
    atexit.register(_leave, os.getpid())
    return store


def why_not_joined(error: BaseException) -> str:
    """Returns a sentence about an error of torch's store before there was a process group; empty for other errors."""
    world, host = os.environ.get("WORLD_SIZE", "1"), os.environ.get("MASTER_ADDR", "?")
    is_of_store = isinstance(error, dist.DistStoreError | dist.DistNetworkError)
    if not is_of_store or dist.is_initialized() or world == "1" or "EADDRINUSE" in str(error):  # the port is taken
        return ""
    return (
        f"Not all {world} ranks have joined within --distributed.timeout_s: one has failed, was not started, or cannot "
        f"reach {host} (MASTER_ADDR). Look at the output of the other ranks."
    )


def _leave(process: int) -> None:
    """Destroys a group that no program closed: threads of gloo abort a process that is torn down before them.

    After an error nothing is destroyed, which would wait for ranks that are gone.
    """
    if os.getpid() != process:
        end_child(process)
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


def take_role(role: str) -> None:
    """Makes join() enter the world of this role, which shares torchrun's store with other worlds."""
    global _role
    _role = role


def rank_name() -> str:
    """Returns the name of this rank in messages; empty for a process that torchrun did not start."""
    rank = os.environ.get("RANK", "")
    return rank and name_of(rank)


def name_of(rank: int | str) -> str:
    """Returns the name of a rank of this world, with its role if the run splits its ranks into several."""
    return f"{_role} rank {rank}".strip()


def store_of(role: str) -> Store:
    """Returns the store of a role's world; only after join()."""
    assert _meeting is not None, "join() comes first"
    # After an elastic restart the agent's store still holds the addresses of the ranks that died. Any other store is
    # new, and its ranks may have counted different restarts: one agent may have come in place of another.
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True"
    attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if is_kept else '0'}"
    return PrefixStore(f"{attempt}/{role}" if role else attempt, _meeting)


def check_environment() -> None:
    """Raises EnvironmentVariableError unless the variables that torchrun sets describe a rank of a world."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise EnvironmentVariableError(
            f"Environment variables missing for a distributed run: {', '.join(missing)}. Start it with torchrun "
            "or set them all; without any of them lightrl runs as one process."
        )
    for name in (*(name for name in _TORCHRUN_VARIABLES if name != "MASTER_ADDR"), "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdecimal():
            raise EnvironmentVariableError(
                f"The environment variable {name} is {os.environ[name]!r}: it must be a whole number."
            )
    if not 0 < int(os.environ["MASTER_PORT"]) < 65536:  # torchrun --master_port 0 passes 0 on
        raise EnvironmentVariableError(
            f"The environment variable MASTER_PORT is {os.environ['MASTER_PORT']}: it must be 1 to 65535. "
            "torchrun --standalone chooses a free port."
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world:
        raise EnvironmentVariableError(
            f"The environment variable RANK is {rank}: with WORLD_SIZE {world} it must be 0 to {world - 1}."
        )


def backend_for(device: torch.device) -> str:
    """Returns the process group's back ends; both on a GPU, because FSDP reduces CPU tensors when it offloads."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def control_group(timeout: timedelta) -> dist.ProcessGroup:
    """Makes the group for numbers, objects and decisions."""
    group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    return group


def consecutive_group(rank: int, world: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Splits the world into gloo groups of `size` consecutive ranks and returns this rank's; every rank calls it."""
    groups: list[dist.ProcessGroup] = [  # every rank makes every group, or new_group hangs
        dist.new_group(range(start, start + size), timeout=timeout, backend="gloo") for start in range(0, world, size)
    ]
    return groups[rank // size]


def link_group(name: str, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Makes a group of ranks from several worlds, outside the groups of each world; all `size` ranks call it."""
    store = PrefixStore(name, store_of("link"))
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def error_of_nccl() -> str:
    """Returns the error that torch has found in a collective on a GPU, such as TIMEOUT; empty if there is none.

    A minute later torch ends the process from a thread, while the main thread still waits for the device:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (Watchdog::runLoop)
    """
    for group in list(dist.distributed_c10d._world.pg_map):  # torch has no public name for all groups
        with suppress(RuntimeError, AttributeError):  # a group without NCCL
            error = str(group._get_backend(torch.device("cuda")).get_error().name)
            if error != "SUCCESS":
                return error
    return ""


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether an error of torch.distributed says that another rank has left or does not answer.

    Others may use the same words, such as a reward whose server has timed out. NCCL and the store have exceptions of
    their own; Gloo raises RuntimeError.
    """
    text = str(error)
    is_of_gloo = type(error) is RuntimeError and any(sign in text for sign in _OF_GLOO)
    return (is_of_gloo or isinstance(error, dist.DistError)) and any(sign in text for sign in _PEER_LOST)


def watch_group(rank: int, size: int) -> Any:
    """Makes a group over which nothing is sent while all is well: a receive in it ends when the peer does."""
    return link_group("watch", rank, size, torch.device("cpu"), _LINK_WATCH)


def pick_gpu(num_gpu_per_node: int) -> torch.device:
    """Makes GPU LOCAL_RANK (if unset, RANK % num_gpu_per_node) the current device of this process, and returns it."""
    if not torch.cuda.is_available():
        raise ValueError("The device is set to 'cuda', but torch sees no GPU. Use --distributed.device cpu or auto.")
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % num_gpu_per_node))
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise ValueError(
            f"Local rank {local_rank} has no GPU: {visible} usable here. Start at most that many processes."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def free_port() -> int:
    """Returns a port on which nobody listens at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
