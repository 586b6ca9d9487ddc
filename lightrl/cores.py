"""How many cores of the machine a run may use, which a job or a container may limit to a few of them."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000": 2 cores for this container; "max 100000": all


def usable_cores() -> int:
    """Returns how many cores the ranks on this machine may use together."""
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ  # of torchrun, which may bind each rank to a part of its own cores
    return min(_bound_to(os.getppid() if is_rank else 0), _quota())


def cores_of_rank() -> int:
    """Returns how many cores this rank may use; at least 1."""
    share = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(share, _bound_to(0)))


def _bound_to(pid: int) -> int:
    """Returns how many cores a process is bound to; pid: 0 means this one."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(pid))


def _quota() -> int:
    """Returns the limit of this container, rounded up."""
    try:
        quota, period = _QUOTA.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # there is none
        return sys.maxsize
