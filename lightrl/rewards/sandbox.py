"""Runs untrusted Python programs in a process of their own, with limits. docs/rewards.md says what it protects from."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_GRACE_S = 20.0  # for the launcher to start, kill and clean up on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The time, memory and output that a program may use."""

    timeout_s: float = 10.0  # wall clock; the CPU time of each process is limited to the same
    memory_mb: int = 512  # addresses of each process
    max_output_bytes: int = 1 << 20
    use_namespaces: bool = True  # where the system allows them: no network, and no process outlives the program


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The output of a program and how it ended."""

    stdout: str
    stderr: str  # its end
    exit_code: int | None  # negative: the signal that ended it; None: it was killed at a limit
    timed_out: bool
    has_namespaces: bool


def run_python(source: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Runs a program as __main__; raises RuntimeError if the sandbox itself fails."""
    limits = limits or SandboxLimits()
    request = {
        "source": source,
        "stdin": stdin,
        "timeout_s": limits.timeout_s,
        "memory_mb": limits.memory_mb,
        "max_output_bytes": limits.max_output_bytes,
        "use_namespaces": limits.use_namespaces,
    }
    report = json.loads(_launch(json.dumps(request), limits.timeout_s + _GRACE_S))
    if "error" in report:
        raise RuntimeError(f"The sandbox could not be set up: {report['error']}")
    if limits.use_namespaces and not report["has_namespaces"]:
        _warn_of_weak_isolation()
    return SandboxResult(**report)


def _launch(request: str, timeout_s: float) -> str:
    # -I: neither the environment nor the working directory is on the program's import path. The environment is new,
    # so that no API key is in it.
    with subprocess.Popen(
        [sys.executable, "-I", str(_LAUNCHER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**_ENVIRONMENT, "TMPDIR": tempfile.gettempdir()},
    ) as process:
        try:
            output, errors = process.communicate(request, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise RuntimeError(f"The sandbox did not end within {timeout_s:g} s.") from None
    if process.returncode != 0:
        raise RuntimeError(f"The sandbox failed with exit code {process.returncode}: {errors[-1000:]}")
    return output


@lru_cache(maxsize=1)
def _warn_of_weak_isolation() -> None:
    logger.warning(
        "This system does not allow the sandbox its own namespaces: programs are kept from the network by a hook in "
        "Python only, which a hostile program can pass. Allow unprivileged user namespaces, or run in a container "
        "without a network."
    )
