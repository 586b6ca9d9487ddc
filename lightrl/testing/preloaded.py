"""Runs Python programs in forks of a process with all imports done, so that a rank starts within milliseconds.

The ranks of a job come from servers with different hash seeds, which they have under torchrun, too, so code that
depends on the order of a set fails. Do not use it with CUDA, which does not survive a fork.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch

_MAX_REQUEST_BYTES = 2**17  # of JSON: arguments and environment
_NUM_SERVERS = 2  # one per hash seed; ranks are dealt out to them in turn
_START_TIMEOUT_S = 120.0  # the first start waits for the imports
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # what the imports read
_IMPORTED = (
    "torch._dynamo",  # DeepSpeed and DTensor load it, which takes longer than a test's training
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "lightrl.trainers.dpo",
    "lightrl.trainers.grpo",
    "lightrl.trainers.ppo",
    "lightrl.trainers.reward_model",
    "lightrl.trainers.sft",
)


@dataclass(frozen=True)
class Program:
    """A program to run: a file, or a module if the name does not end in .py, with its arguments."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str


class Forked:
    """A program that runs in a forked process."""

    def __init__(self, channel: socket.socket) -> None:
        self.exit_code: int | None = None  # negative for a signal
        self._lines = channel.makefile()
        self._channel = channel
        channel.settimeout(_START_TIMEOUT_S)
        self._pid = self._next_number()
        channel.settimeout(None)

    def fileno(self) -> int:
        """Returns a descriptor that is readable once the program has ended."""
        return self._channel.fileno()

    def read_exit_code(self) -> None:
        """Waits until the program has ended, and returns its exit code."""
        self.exit_code = self._next_number()
        self._lines.close()
        self._channel.close()

    def _next_number(self) -> int:
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise RuntimeError(f"No program was forked within {_START_TIMEOUT_S:.0f} s.") from None
        if not line:
            raise RuntimeError("The process that programs are forked from has ended; its message stands above.")
        return int(line)

    def send(self, signum: int) -> None:
        """Sends a signal to the program."""
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self._pid, signum)

    def kill_all(self) -> None:
        """Kills the program and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def start(program: Program, output: IO[Any], rank: int = 0) -> Forked:
    """Starts a program, with both of its output streams written to the file."""
    ours, theirs = socket.socketpair()
    with theirs:
        request = json.dumps(vars(program), default=list).encode()
        if len(request) > _MAX_REQUEST_BYTES:
            raise ValueError(f"{len(request)} bytes of arguments and environment: at most {_MAX_REQUEST_BYTES}.")
        socket.send_fds(_server(rank % _NUM_SERVERS), [request], [theirs.fileno(), output.fileno()])
    return Forked(ours)


@cache
def _server(number: int) -> socket.socket:
    """Starts a server, which ends with this process: even if that is killed, its standard input is closed then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {**ENVIRONMENT, "PYTHONHASHSEED": str(number)}
        command = [sys.executable, "-c", "from lightrl.testing import preloaded; preloaded.serve()"]
        server = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    atexit.register(_end, server, os.getpid())
    return ours


def _end(server: subprocess.Popen[bytes], starter: int) -> None:
    """Ends a server with the process that started it, and not with a fork of that process."""
    if os.getpid() == starter:
        server.kill()
        server.wait()


def serve() -> None:
    """Forks requested programs until standard input is closed; the forked processes leave by SystemExit."""
    requests = socket.socket(fileno=0)
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise the collector would write to every shared page, and so copy it
    atexit.register(gc.unfreeze)  # otherwise libraries report uncollected objects at the end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for the programs
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 2)
        if not request:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            _run_and_report(Program(**json.loads(request)), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_and_report(program: Program, channel: int, output: int) -> None:
    pid = os.fork()
    if pid == 0:
        os.close(channel)
        os.setsid()
        _become(program, output)
    with open(channel, "w") as answer:
        print(pid, file=answer, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answer, flush=True)
    os._exit(0)


def _become(program: Program, output: int) -> NoReturn:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):  # ranks share the file: a line is one write, with PYTHONUNBUFFERED too
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    _reseed()
    is_file = program.name.endswith(".py")
    sys.path[0] = str(Path(program.name).resolve().parent) if is_file else program.folder
    sys.argv = [program.name, *program.arguments]
    if is_file:
        runpy.run_path(program.name, run_name="__main__")
    else:
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    sys.exit(0)


def _reseed() -> None:
    """Reseeds as in a new process, so that an unseeded draw differs from rank to rank."""
    random.seed()
    np.random.seed()
    torch.seed()
