"""Checks this machine: devices, memory, process limits, folders and the sandbox."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from lightrl.cores import usable_cores
from lightrl.doctor.findings import Finding, judged, ok
from lightrl.rewards.sandbox import SandboxUnavailableError, choose_confinement, hides_packages

_GB = 1 << 30
_FEW_FILES = 4096  # a rank has files and sockets for loaders, workers and connections to every other rank
_SMALL_SHARED_MEMORY = _GB  # NCCL takes some tens of MB for each rank, vLLM and data loaders more
_LITTLE_DISK = 10 * _GB
_LOOK_UP_S = 10.0


def num_local_ranks() -> int:
    """Returns how many ranks torchrun started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_devices() -> Iterator[Finding]:
    """Yields findings about the devices, and whether each local rank has one of its own."""
    if not torch.cuda.is_available():
        cores, threads = usable_cores(), torch.get_num_threads() * num_local_ranks()
        yield ok("devices", f"no GPU: everything runs on {cores} CPU cores")
        yield judged(
            "threads",
            f"{threads} threads of {num_local_ranks()} rank(s) on {cores} cores",
            warns=threads > cores,
            remedy=f"Set OMP_NUM_THREADS={max(1, cores // num_local_ranks())}: more threads than cores are far slower.",
        )
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    yield judged(
        "devices",
        f"{count} x {' / '.join(names)}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
        fails=count < num_local_ranks(),
        remedy=f"Start at most {count} ranks here, or give the process more devices by CUDA_VISIBLE_DEVICES.",
    )
    yield from _gpu_memory(count)
    yield from _peer_access(count)


def _gpu_memory(count: int) -> Iterator[Finding]:
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        yield judged(
            f"memory of GPU {index}",
            f"{free / _GB:.1f} of {total / _GB:.1f} GB free",
            warns=free < 0.9 * total,
            remedy="Another process uses this GPU: nvidia-smi names it.",
        )


def _peer_access(count: int) -> Iterator[Finding]:
    pairs = [(one, two) for one in range(count) for two in range(one + 1, count)]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if pairs:
        yield judged(
            "peer access",
            f"{len(pairs) - len(apart)} of {len(pairs)} pairs of GPUs reach each other directly",
            warns=bool(apart),
            remedy="The others go through host memory, which is slower: compare `nvidia-smi topo -m`, IOMMU and ACS.",
        )


def check_limits() -> Iterator[Finding]:
    """Yields findings about the process limits that runs reach first."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield judged(
        "open files",
        "unlimited" if files == resource.RLIM_INFINITY else str(files),
        warns=files != resource.RLIM_INFINITY and files < _FEW_FILES,
        remedy=f"Raise the limit before the start: ulimit -n {_FEW_FILES}, or LimitNOFILE of the service.",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    has_infiniband = Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())
    if has_infiniband:
        yield judged(
            "locked memory",
            "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / _GB:.3f} GB",
            fails=locked != resource.RLIM_INFINITY,
            remedy="RDMA needs `ulimit -l unlimited` (or --ulimit memlock=-1 in a container).",
        )
    shared = Path("/dev/shm")
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        yield judged(
            "shared memory",
            f"{usage.free / _GB:.1f} of {usage.total / _GB:.1f} GB free in {shared}",
            fails=usage.free < 64 << 20,
            warns=usage.free < _SMALL_SHARED_MEMORY,
            remedy="Start the container with --shm-size 16g (or --ipc host), and delete what dead programs left there.",
        )


def check_ports() -> Iterator[Finding]:
    """Yields findings about listening on the loopback interface, and about the address of this machine's own name."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname(), timeout=5):
            yield ok("loopback", "a connection to 127.0.0.1 works")
    name = socket.gethostname()
    try:
        address = _address_of(name)
    except OSError as error:
        remedy = (
            f"Add {name} to /etc/hosts, or name the network interface by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
        )
        yield Finding("host name", "warning", f"{name} has no address ({error})", remedy)
        return
    yield judged(
        "host name",
        f"{name} is {address}",
        warns=address.startswith("127.") and int(os.environ.get("WORLD_SIZE", "1")) > num_local_ranks(),
        remedy="Other machines cannot reach a loopback address: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    )


def _address_of(name: str) -> str:
    """Returns the address; raises OSError without an answer. A thread asks: looking up a name has no time limit."""
    found: list[str | OSError] = []

    def look_up() -> None:
        try:
            found.append(socket.gethostbyname(name))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_LOOK_UP_S)
    answer = found[0] if found else OSError(f"no answer within {_LOOK_UP_S:g} s")
    if isinstance(answer, OSError):
        raise answer
    return answer


def check_folders(output_dir: str = "") -> Iterator[Finding]:
    """Yields findings about the folders that a run writes to: whether they are writable, and their free space."""
    folders = {
        "output folder": (Path(output_dir or "runs"), "--output_dir"),
        "cache of built-in models": (_from_environment("LIGHTRL_CACHE", "~/.cache/lightrl"), "LIGHTRL_CACHE"),
        "cache of Hugging Face": (_from_environment("HF_HOME", "~/.cache/huggingface"), "HF_HOME"),
        "temporary files": (Path(tempfile.gettempdir()), "TMPDIR"),
    }
    for name, (folder, setting) in folders.items():
        yield _writable(name, folder, setting)


def _from_environment(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser()


def nearest_folder(folder: Path) -> Path:
    """Returns the folder, or the closest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _writable(name: str, folder: Path, setting: str) -> Finding:
    try:
        nearest = nearest_folder(folder)
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = f"Give a folder that can be written by {setting}."
        return Finding(name, "fail", f"{folder} cannot be written: {error.strerror or error}", remedy)
    free = shutil.disk_usage(nearest).free
    return judged(
        name,
        f"{folder}, {free / _GB:.1f} GB free",
        warns=free < _LITTLE_DISK,
        remedy=f"A checkpoint has about 12 bytes a parameter: make room, or name another folder by {setting}.",
    )


def check_sandbox() -> Iterator[Finding]:
    """Yields a finding about how the programs of the reward `code` are confined, or why they cannot be."""
    try:
        confinement = choose_confinement()
    except SandboxUnavailableError as error:
        yield Finding("sandbox", "warning", "none works, so --reward code is refused", str(error))
        return
    yield judged(
        "sandbox",
        f"--reward code runs programs by {confinement}",
        warns=confinement != "landlock" and hides_packages(),
        remedy="Programs cannot import installed packages, since these are in /tmp: make the environment elsewhere.",
    )
