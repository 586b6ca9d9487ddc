"""run_spmd: starts real ranks with a hard time-out, for tests of lightrl and its plug-ins."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightrl.process_group import free_port
from lightrl.testing.preloaded import ENVIRONMENT, Forked, Program, start

_GRACE_S = 30  # from SIGTERM to SIGKILL, as in torchrun
_READ_BY_IMPORTS = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "HF_",
    "TRANSFORMERS_",
    "PYTHON",
    "LD_",
)


class SpmdError(AssertionError):
    """A program on several ranks failed or hung; the message holds what it printed."""


def run_spmd(
    program: str | Path,
    *args: str,
    world_size: int,
    timeout_s: float = 240,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    expect_failure: bool = False,
    torchrun: bool = False,
) -> str:
    """Runs a Python file on world_size ranks and returns what it printed; kills it at the time-out.

    The ranks have the environment variables that torchrun sets. They are forked from processes that have already
    imported torch, transformers and lightrl. torchrun itself starts them if torchrun=True, if there is a GPU, on macOS,
    or if env changes what an import reads.
    """
    if torchrun or not _may_fork(env):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world_size)]
        command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), str(program), *args]
        return _run_command(command, timeout_s, env, cwd, expect_failure)
    with store_of_ranks() as port:
        ranks = [environment_of_rank(rank, world_size, port, env) for rank in range(world_size)]
        return _run_forked([str(program), *args], ranks, timeout_s, cwd, expect_failure)


def run_program(
    command: list[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    expect_failure: bool = False,
) -> str:
    """Runs any command line like run_spmd; its whole process group is killed at the time-out.

    If the command runs a Python file or a module of lightrl with this interpreter, it is forked like run_spmd's ranks.
    """
    python, *rest = command
    if rest[:1] == ["-m"]:
        rest = rest[1:]
    is_ours = python == sys.executable and bool(rest) and (rest[0].endswith(".py") or rest[0].startswith("lightrl."))
    if is_ours and _may_fork(env):
        return _run_forked(rest, [_environment(env)], timeout_s, cwd, expect_failure)
    return _run_command(command, timeout_s, env, cwd, expect_failure)


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _may_fork(env: Mapping[str, str] | None) -> bool:
    """Returns False if env changes what imports read, and with CUDA or macOS, whose libraries do not survive a fork."""
    read = {name: value for name, value in (env or {}).items() if name.startswith(_READ_BY_IMPORTS)}
    is_same = all(ENVIRONMENT.get(name) == value for name, value in read.items())
    return sys.platform == "linux" and not _has_gpu() and is_same


@contextmanager
def store_of_ranks() -> Iterator[int]:
    """Yields the port of a store at which ranks meet; like torchrun's store, it outlives them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def environment_of_rank(rank: int, world_size: int, port: int, env: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the environment of a rank: this process's variables, torchrun's, and the given ones."""
    world = str(world_size)
    torchrun = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": "0", "ROLE_NAME": "default",
        "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world, "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    return _environment({**torchrun, **(env or {})})


def _run_forked(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    timeout_s: float,
    cwd: str | Path | None,
    expect_failure: bool,
) -> str:
    name, *arguments = command
    folder = str(Path(cwd or ".").resolve())
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        programs = [Program(name, arguments, environment, folder) for environment in environments]
        ranks: list[Forked] = []
        try:
            for rank, program in enumerate(programs):
                ranks.append(start(program, output, rank))
            left = _wait(ranks, timeout_s, first_failure=True)
            is_late = bool(left) and not any(rank.exit_code for rank in ranks)
        finally:
            _end(ranks)
        output.seek(0)
        said = output.read()
    if is_late:
        raise SpmdError(f"No end after {timeout_s:.0f} s: {' '.join(command)}\n{said}")
    codes = [rank.exit_code for rank in ranks]
    if any(codes) != expect_failure:
        raise SpmdError(f"Exit code {', '.join(map(str, codes))}: {' '.join(command)}\n{said}")
    return said


def _end(ranks: Sequence[Forked]) -> None:
    """Asks running ranks to end, then kills them."""
    left = [rank for rank in ranks if rank.exit_code is None]
    try:
        for rank in left:
            rank.send(signal.SIGTERM)
        left = _wait(left, _GRACE_S)
    finally:
        for rank in left:
            rank.kill_all()
        _wait(left, _GRACE_S)


def _wait(ranks: Sequence[Forked], timeout_s: float, *, first_failure: bool = False) -> list[Forked]:
    """Waits until the time-out or the first failure; returns the ranks that are still running."""
    deadline = time.monotonic() + timeout_s
    left = list(ranks)
    while left and (seconds := deadline - time.monotonic()) > 0:
        for ended in select.select(left, [], [], seconds)[0]:
            ended.read_exit_code()
        left = [rank for rank in left if rank.exit_code is None]
        if first_failure and any(rank.exit_code for rank in ranks):
            break
    return left


def _run_command(
    command: list[str],
    timeout_s: float,
    env: Mapping[str, str] | None,
    cwd: str | Path | None,
    expect_failure: bool,
) -> str:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(env),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:  # Ctrl-C, too, which does not reach a session of its own
        output = _ended(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise SpmdError(f"No end after {timeout_s:.0f} s: {' '.join(command)}\n{output}") from None
    if (process.returncode != 0) != expect_failure:
        raise SpmdError(f"Exit code {process.returncode}: {' '.join(command)}\n{output}")
    return output


def _ended(process: subprocess.Popen[str]) -> str:
    """Ends a process gently: only torchrun can end its ranks, which have sessions of their own."""
    process.terminate()
    try:
        output, _ = process.communicate(timeout=_GRACE_S + 15)  # torchrun kills after 30 s
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
    return output
