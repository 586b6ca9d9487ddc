"""run_and_signal: starts real ranks and sends some of them a signal, to test how a run ends and what it reports."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from lightrl.process_group import free_port
from lightrl.testing.preloaded import Forked, Program, start
from lightrl.testing.spmd import environment_of_rank, store_of_ranks

Launcher = Literal["torchrun", "forked", "nobody"]

_POLL_S = 0.02
_GRACE_S = 30.0  # time for torchrun to end its ranks


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    codes: tuple[int | None, ...]  # of the ranks, or of torchrun; negative for a signal, None: had to be killed
    seconds: float  # from the signal to the end of the last rank
    was_signalled: bool  # False: the run ended by itself before the signal was due
    said: str

    @property
    def is_late(self) -> bool:
        """Whether a rank was still running at the time-out."""
        return None in self.codes


class _Job(Protocol):
    """The running ranks of a program."""

    def is_running(self, rank: int) -> bool: ...

    def send(self, rank: int, signum: int) -> None: ...

    def wait(self, seconds: float) -> bool:
        """Waits at most the given number of seconds; returns whether everything has ended."""
        ...

    def codes(self) -> tuple[int | None, ...]: ...


def run_and_signal(
    program: str | Path,
    *args: str,
    world_size: int,
    victims: Sequence[int],
    signum: int,
    when: Callable[[float], bool],
    timeout_s: float,
    end_timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    launcher: Launcher = "forked",
) -> Ending:
    """Runs a Python file on world_size ranks and sends a signal to some of them.

    Args:
        when: Takes the seconds since the start, and returns whether it is time for the signal.
        timeout_s: Time limit for the signal to become due. After that, a run that is still going is killed.
        end_timeout_s: Time limit for the ranks to end after the signal.
        env: Environment variables of the ranks in addition to this process's own.
        launcher: Who starts the ranks. "torchrun" ends all ranks when one has failed. "forked": this process does the
            same, but faster. "nobody": this process starts the ranks but never ends them, so that they have to notice
            a failure themselves.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with _JOBS[launcher]([str(program), *args], world_size, output, env or {}) as job:
            started = time.monotonic()
            was_signalled = False
            while not (ended := job.wait(_POLL_S)) and time.monotonic() < started + timeout_s:
                if when(time.monotonic() - started) and all(map(job.is_running, victims)):
                    was_signalled = True
                    break
            signalled = time.monotonic()
            if was_signalled:
                for rank in victims:
                    job.send(rank, signum)
                ended = job.wait(end_timeout_s)
            seconds = time.monotonic() - signalled
            codes = job.codes() if ended else (None,)
        output.seek(0)
        return Ending(codes, seconds, was_signalled, output.read())


class _ForkedJob:
    def __init__(self, ranks: Sequence[Forked], *, ends_all: bool) -> None:
        """Takes the ranks; with ends_all they are told to end when one has failed."""
        self._ranks = ranks
        self._ends_all = ends_all

    def is_running(self, rank: int) -> bool:
        return self._ranks[rank].exit_code is None

    def send(self, rank: int, signum: int) -> None:
        if self.is_running(rank):
            self._ranks[rank].send(signum)

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while left := [rank for rank in self._ranks if rank.exit_code is None]:
            for ended in select.select(left, [], [], max(0.0, deadline - time.monotonic()))[0]:
                ended.read_exit_code()
            if self._ends_all and any(rank.exit_code for rank in self._ranks):
                self._ends_all = False
                for rank in self._ranks:
                    if rank.exit_code is None:
                        rank.send(signal.SIGTERM)
            if time.monotonic() >= deadline:
                break
        return all(rank.exit_code is not None for rank in self._ranks)

    def codes(self) -> tuple[int | None, ...]:
        return tuple(rank.exit_code for rank in self._ranks)


@contextmanager
def _forked(
    command: Sequence[str], world: int, output: IO[Any], env: Mapping[str, str], *, ends_all: bool
) -> Iterator[_Job]:
    name, *arguments = command
    ranks: list[Forked] = []
    with store_of_ranks() as port:
        try:
            for rank in range(world):
                variables = environment_of_rank(rank, world, port, env)
                ranks.append(start(Program(name, arguments, variables, os.getcwd()), output, rank))
            yield _ForkedJob(ranks, ends_all=ends_all)
        finally:
            for rank_process in ranks:
                if rank_process.exit_code is None:
                    rank_process.kill_all()
                    rank_process.read_exit_code()


class _TorchrunJob:
    def __init__(self, launcher: subprocess.Popen[bytes]) -> None:
        self._launcher = launcher

    def is_running(self, rank: int) -> bool:
        return rank in self._pids()

    def send(self, rank: int, signum: int) -> None:
        pid = self._pids().get(rank)
        with suppress(ProcessLookupError):  # it has ended meanwhile
            if pid is not None:
                os.kill(pid, signum)

    def wait(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(seconds)
        return self._launcher.returncode is not None

    def codes(self) -> tuple[int | None, ...]:
        return (self._launcher.returncode,)

    def _pids(self) -> dict[int, int]:
        """Returns the process ids of the ranks, which are torchrun's children."""
        found: dict[int, int] = {}
        children = Path(f"/proc/{self._launcher.pid}/task/{self._launcher.pid}/children")
        for pid in map(int, children.read_text().split()):
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(item[5:]): pid for item in variables if item.startswith(b"RANK=")}
        return found


@contextmanager
def _by_torchrun(command: Sequence[str], world: int, output: IO[Any], env: Mapping[str, str]) -> Iterator[_Job]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world)]
    launch += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), *command]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    with subprocess.Popen(launch, stdout=output, stderr=output, env=variables, start_new_session=True) as launcher:
        try:
            yield _TorchrunJob(launcher)
        finally:
            launcher.terminate()
            try:
                launcher.wait(_GRACE_S + 15)
            except subprocess.TimeoutExpired:
                os.killpg(launcher.pid, signal.SIGKILL)


_JOBS: dict[Launcher, Callable[..., AbstractContextManager[_Job]]] = {
    "torchrun": _by_torchrun,
    "forked": partial(_forked, ends_all=True),
    "nobody": partial(_forked, ends_all=False),
}
