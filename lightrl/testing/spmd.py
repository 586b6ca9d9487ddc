"""For tests of lightrl and of what plugs into it: real ranks with a hard time-out."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


class SpmdError(AssertionError):
    """A program on several ranks failed or hung; the message holds what it printed."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def run_spmd(
    program: str | Path,
    *args: str,
    world_size: int,
    timeout_s: float = 240,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    expect_failure: bool = False,
) -> str:
    """Runs a Python file under torchrun on that many ranks and returns what it printed; kills it at the time-out."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world_size)]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), str(program), *args]
    return run_program(command, timeout_s=timeout_s, env=env, cwd=cwd, expect_failure=expect_failure)


def run_program(
    command: list[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    expect_failure: bool = False,
) -> str:
    """The same for any command line; its whole process group is killed at the time-out."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        output = _ended(process)
        raise SpmdError(f"No end after {timeout_s:.0f} s: {' '.join(command)}\n{output}") from None
    if (process.returncode != 0) != expect_failure:
        raise SpmdError(f"Exit code {process.returncode}: {' '.join(command)}\n{output}")
    return output


def _ended(process: subprocess.Popen[str]) -> str:
    """Asks first: torchrun's ranks are sessions of their own, which only torchrun can end."""
    process.terminate()
    try:
        output, _ = process.communicate(timeout=45)  # torchrun kills after 30 s
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
    return output
