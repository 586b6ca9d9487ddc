"""The process group of torch.distributed, made from what torchrun says in environment variables."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class EnvironmentVariableError(ValueError, RuntimeError):
    """Variables that describe no rank of a world; also a RuntimeError for code that expects one."""


def join(device: torch.device, timeout: timedelta) -> Store:
    """Makes the process group of the ranks that torchrun started; returns the store that they share."""
    check_environment()
    # Sub-groups of a device mesh take this default and would otherwise wait 30 minutes whatever was asked.
    dist.distributed_c10d.default_pg_timeout = timeout
    meeting = rendezvous("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout=timeout)
    store, rank, world = next(iter(meeting))
    store.set_timeout(timeout)
    # After an elastic restart the agent's store still holds the addresses of the ranks that died.
    store = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        backend_for(device),
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
        **options,
    )
    return store


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
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world:
        raise EnvironmentVariableError(
            f"The environment variable RANK is {rank}: with WORLD_SIZE {world} it must be 0 to {world - 1}."
        )


def backend_for(device: torch.device) -> str:
    """Returns the process group's back ends; on a GPU both, as FSDP's collectives are of CPU tensors in an offload."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def control_group(timeout: timedelta) -> dist.ProcessGroup:
    """Makes the group for numbers, objects and decisions."""
    group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    return group
