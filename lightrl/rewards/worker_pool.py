"""Runs an isolated reward in processes of its own. A process that hangs, even in C, is killed and replaced."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import LifoQueue
from typing import Any

from lightrl.records import Sample
from lightrl.rewards.messages import Reply, packed_for_worker, receive, send
from lightrl.rewards.scoring import (
    FailureBudget,
    Isolation,
    NoVerdictError,
    Outcome,
    RewardKind,
    RewardRunner,
    ScoringLimits,
    failed,
    reward_name,
    score_outcome,
)

_START_S = 120.0  # limit for the imports, on a busy machine
_GRACE_S = 2.0  # time for a worker to stop by itself before it is killed


class WorkerError(Exception):
    """A reward raised an error in a worker; the cause holds the worker's traceback."""


class WorkerTraceback(Exception):  # noqa: N818  (a text shown as the cause of a WorkerError, never raised by itself)
    """The traceback as the worker wrote it."""


class IsolatedRunner(RewardRunner):
    """Runs an isolated reward in a pool of processes."""

    def __init__(self, reward: Any, kind: RewardKind, limits: ScoringLimits, name: str) -> None:
        super().__init__(reward, kind, limits, name)
        assert kind.isolation is not None
        self._pool = WorkerPool(reward, kind.isolation, num_workers=limits.num_workers, timeout_s=limits.timeout_s)

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns an outcome for each sample; raises RewardError as soon as the budget is exceeded."""
        values = zip(samples, self._pool.run(samples), strict=True)
        return [self._outcome(sample, value, budget) for sample, value in values]

    async def arun(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Does what run() does for an episode; episodes that ask at the same time share the processes."""
        futures = self._pool.submit(samples)
        try:
            return [
                self._outcome(sample, await asyncio.wrap_future(future), budget)
                for sample, future in zip(samples, futures, strict=True)
            ]
        finally:  # what has not begun is not needed if the episode was cancelled
            for future in futures:
                future.cancel()

    def _outcome(self, sample: Sample, value: Any, budget: FailureBudget) -> Outcome:
        is_error = isinstance(value, Exception)
        outcome = failed(self.name, [sample], value) if is_error else score_outcome(self.name, sample, value)
        budget.record([outcome])
        return outcome

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()


class WorkerPool:
    """A pool of processes that are started at their first use and then kept; one thread at a time calls it."""

    def __init__(
        self, reward: Any, isolation: Isolation, *, num_workers: int, timeout_s: float, call: Any = None
    ) -> None:
        """call: what the processes call with a sample; None: the reward itself."""
        self._name, self._packed = reward_name(reward), packed_for_worker(reward)
        if call is not None:
            self._packed = (self._packed[0], pickle.dumps(call))
        self._isolation = isolation
        self._num_workers = max(1, num_workers)
        self._timeout_s = min((limit for limit in (timeout_s, isolation.timeout_s) if limit), default=0.0)
        self._workers: list[_Worker] = []
        # Lacks those that still work for a run that was given up. The last in is the first out, so that a worker
        # whose process runs is taken before one that has none yet.
        self._idle: LifoQueue[_Worker] = LifoQueue()
        self._threads: ThreadPoolExecutor | None = None

    def run(self, samples: Sequence[Sample]) -> Iterator[Any]:
        """Yields for each sample what the reward returned, or an exception in its place."""
        return self._open().map(partial(self._run_one, self._idle), samples)

    def submit(self, samples: Sequence[Sample]) -> list[Future[Any]]:
        """Returns for each sample the future of what run() would yield."""
        threads = self._open()
        return [threads.submit(self._run_one, self._idle, sample) for sample in samples]

    def _open(self) -> ThreadPoolExecutor:
        """Returns the threads that wait for the processes, which start with the first sample that needs one more."""
        if self._threads is None:
            # Kept until close(): a worker dies with the thread that started it, so none outlives a killed owner.
            self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="reward")
            self._workers = [_Worker(self._name, self._packed) for _ in range(self._num_workers)]
            for worker in self._workers:
                self._idle.put(worker)
        return self._threads

    def _run_one(self, idle: LifoQueue[_Worker], sample: Sample) -> Any:
        worker = idle.get()
        try:
            return self._result(worker.ask(sample, self._timeout_s))
        finally:
            idle.put(worker)

    def _result(self, reply: Reply) -> Any:
        if not reply.error:
            return reply.value
        error: Exception
        if reply.is_no_verdict or (reply.is_stopped and self._isolation.no_verdict_if_stopped):
            error = NoVerdictError(reply.error)
        else:
            error = WorkerError(reply.error)
        if reply.traceback:
            error.__cause__ = WorkerTraceback(f"in the worker:\n{reply.traceback}")
        return error

    def close(self) -> None:
        """Kills the processes."""
        threads, workers = self._threads, self._workers
        self._threads, self._workers, self._idle = None, [], LifoQueue()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.stop()
        if threads is not None:
            threads.shutdown()  # before the pipes are closed, whose numbers other files would get
        for worker in workers:
            worker.kill()


class _Worker:
    """One process; if it was killed, the next sample starts it again."""

    def __init__(self, name: str, packed: tuple[str, bytes]) -> None:
        self._name = name
        self._packed = packed
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, sample: Sample, timeout_s: float) -> Reply:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin.fileno(), (sample, timeout_s))
            reply: Reply = receive(process.stdout.fileno(), timeout_s + _GRACE_S if timeout_s else None)
        except TimeoutError:
            self.kill()
            return Reply(error=f"no result after {timeout_s:g} s; its process was killed", is_stopped=True)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self.kill()
            return Reply(error=f"its process ended with exit code {code}", is_stopped=True)
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightrl.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_worker_environment(),
            start_new_session=True,  # so that processes started by the reward are killed with it
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin.fileno(), self._packed)
            reply: Reply = receive(process.stdout.fileno(), _START_S)
        except TimeoutError as error:
            self.kill()
            raise RuntimeError(f"A process for the reward {self._name!r} did not start within {_START_S} s.") from error
        except (EOFError, BrokenPipeError) as error:
            code = process.wait()
            self.kill()
            raise RuntimeError(
                f"A process for the reward {self._name!r} ended with exit code {code} before it was ready: what "
                "it wrote to standard error says why."
            ) from error
        if reply.error:
            self.kill()
            raise RuntimeError(f"A process could not load the reward {self._name!r}: {reply.traceback}")
        return process

    def stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        self.stop()
        process, self._process = self._process, None
        if process is None:
            return
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def _worker_environment() -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
