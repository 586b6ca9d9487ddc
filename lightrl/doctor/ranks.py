"""Checks that need all ranks together: connections, equal versions, a device for each rank, clocks, a shared folder."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lightrl.comm import Comm
from lightrl.doctor.findings import Finding, judged, ok
from lightrl.doctor.machine import nearest_folder
from lightrl.doctor.packages import versions

_LARGE = 16 << 20  # bytes of the timed all-reduce
_SKEW_S = 1.0  # a larger difference of clocks makes logs of several machines unreadable and can upset file systems
_SEEN_S = 5.0  # a network file system may show a new file to other machines only after a while
_SETTINGS = (
    "NCCL_",
    "GLOO_",
    "OMP_NUM_THREADS",
    "MKL_CBWR",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_",
    "CUDA_DEVICE_ORDER",
)


def check_ranks(comm: Comm, output_dir: str = "") -> Iterator[Finding]:
    """Yields the findings of all ranks together; every rank must iterate over it in step with the others."""
    facts = comm.all_gather_object(_facts(comm))
    yield _collective(comm, comm.device)
    if comm.device.type != "cpu":
        yield _collective(comm, torch.device("cpu"))
    yield _clocks(comm)
    yield _equal("equal versions", [fact["versions"] for fact in facts], "Install the same versions on every machine.")
    yield _equal("equal settings", [fact["settings"] for fact in facts], "Set these variables alike on every machine.")
    yield _own_devices([(fact["host"], fact["gpu"]) for fact in facts])
    yield _shared_folder(comm, nearest_folder(Path(output_dir or "runs")))


def _facts(comm: Comm) -> dict[str, Any]:
    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    gpu = str(torch.cuda.get_device_properties(comm.device).uuid) if comm.device.type == "cuda" else ""
    return {"host": socket.gethostname(), "gpu": gpu, "versions": versions(), "settings": settings}


def _collective(comm: Comm, device: torch.device) -> Finding:
    """Sums known numbers over the ranks, then times a large sum."""
    check = f"all-reduce on {device.type}"
    counted = comm.all_reduce(torch.tensor([comm.rank + 1.0, 1.0], device=device), op="sum").tolist()
    wanted = [comm.world * (comm.world + 1) / 2, float(comm.world)]
    if counted != wanted:
        remedy = "The network or a device corrupts data: run NCCL's own tests (all_reduce_perf -c 1)."
        return Finding(check, "fail", f"the sum over {comm.world} ranks is {counted}, not {wanted}", remedy)
    data = torch.ones(_LARGE // 4, device=device)
    float(comm.all_reduce(data, op="sum")[0])  # read, so that the device has finished when the clock starts
    comm.barrier()
    start = time.perf_counter()
    total = comm.all_reduce(data, op="sum")
    is_right = bool((total == comm.world).all())
    seconds = time.perf_counter() - start
    return judged(
        check,
        f"{comm.world} ranks, {_LARGE >> 20} MB in {1000 * seconds:.1f} ms ({_LARGE / seconds / 1e9:.2f} GB/s)",
        fails=not is_right,
        remedy="A large sum is wrong: run NCCL's own tests (all_reduce_perf -c 1).",
    )


def _clocks(comm: Comm) -> Finding:
    """Compares the clocks of the ranks right after a barrier, whose duration bounds the error."""
    start = time.monotonic()
    comm.barrier()
    times = comm.all_gather_object(time.time())
    uncertain = time.monotonic() - start
    skew = max(times) - min(times)
    return judged(
        "clocks",
        f"{1000 * skew:.1f} ms apart at most (measured to {1000 * uncertain:.1f} ms)",
        warns=skew - uncertain > _SKEW_S,
        remedy="Synchronise the clocks of the machines by chrony or ntpd.",
    )


def _equal(check: str, facts: Sequence[dict[str, str]], remedy: str) -> Finding:
    names = sorted({name for fact in facts for name in fact})
    differing = [name for name in names if len({fact.get(name) for fact in facts}) > 1]
    if not differing:
        return ok(check, f"the same on all {len(facts)} ranks")
    told = [
        f"{name} is " + ", ".join(f"{fact.get(name, 'not set')} (rank {rank})" for rank, fact in enumerate(facts))
        for name in differing
    ]
    return Finding(check, "fail" if check == "equal versions" else "warning", "; ".join(told), remedy)


def _own_devices(places: Sequence[tuple[str, str]]) -> Finding:
    shared = sorted({f"{host} {gpu}" for host, gpu in places if gpu and places.count((host, gpu)) > 1})
    return judged(
        "a device for each rank",
        f"shared: {', '.join(shared)}" if shared else "no two ranks share a GPU",
        fails=bool(shared),
        remedy="Start one rank a GPU: --nproc_per_node is the number of GPUs, and LOCAL_RANK chooses among them.",
    )


def _shared_folder(comm: Comm, folder: Path) -> Finding:
    """Looks on every rank for a file that rank 0 writes for this check."""
    check, file = "shared output folder", _new_file(folder) if comm.is_main else ""
    path = comm.all_gather_object(file)[0]
    if not path:
        return Finding(check, "warning", f"rank 0 cannot write in {folder}", "Give --output_dir of the run.")
    blind = [rank for rank, sees in enumerate(comm.all_gather_object(_appears(Path(path)))) if not sees]
    if comm.is_main:
        Path(path).unlink()
    return judged(
        check,
        f"what rank 0 writes in {Path(path).parent} is not seen by ranks {blind}" if blind else "seen by all ranks",
        warns=bool(blind),
        remedy="Checkpoints of several nodes need a shared file system: give --output_dir a folder of one.",
    )


def _new_file(folder: Path) -> str:
    try:
        handle, path = tempfile.mkstemp(prefix=".lightrl-doctor-", dir=folder)
    except OSError:
        return ""
    os.close(handle)
    return path


def _appears(path: Path) -> bool:
    end = time.monotonic() + _SEEN_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    return path.exists()
