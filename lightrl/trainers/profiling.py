"""Records where a run spends its time (--profile): phases of every rank, traces of torch, memory of the GPU.

A run without the option uses none of this.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from lightrl.checkpoint import save_bytes
from lightrl.config.profile_option import profiled_steps
from lightrl.trainers.observer import Observer

Event = dict[str, Any]  # in the Trace Event Format, which Chrome and Perfetto read

_MEMORY_EVENTS = 200_000  # most allocations in a snapshot
_END = "\n]\n"  # of a trace file


class Profile(Observer):
    """Records the phases of a trainer, and chosen steps with torch's profiler."""

    def __init__(self, trainer: Any) -> None:
        """Starts the recording; every rank must call it."""
        self._comm, self._folder = trainer.strategy.comm, trainer.folder.root / "profile"
        steps = profiled_steps(trainer.config.profile)
        with self._comm.phase("set-up", local=True):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._timeline = Timeline(self._comm.rank)
        within = range(steps.start, min(steps.stop, trainer.config.max_steps + 1))
        self._traced = TracedSteps(within, self._folder, self._comm.rank)
        self._comm.on_span = self._timeline.named

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Records the step as a span and, if it is chosen, with torch's profiler."""
        with self._traced.step(step), self._timeline.span(f"step {step}", "step"):
            yield
        self._write()

    def after_export(self, folder: Path) -> None:
        """Writes the spans since the last step."""
        self._write()

    def _write(self) -> None:
        gathered = self._comm.all_gather_object(self._timeline.take())
        if self._comm.is_main:
            append_events(self._folder / "timeline.json", [event for part in gathered for event in part])


# ---- Phases ----------------------------------------------------------------------------------------------------------


class Timeline:
    """The time spans of one rank, on a clock that all ranks share."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._start = time.time_ns() - time.perf_counter_ns()  # by the performance counter, which does not jump
        self._threads: dict[int, int] = {}
        self._innermost: dict[int, str] = {}  # name of the open span, by index of its thread
        self._events: list[Event] = [
            {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
            {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
        ]

    def named(self, name: str) -> AbstractContextManager[None]:
        """Returns a span for a name of Comm.span(); names that a trainer measures begin with time/.

        A phase within the span of the same name, such as that of a trainer's measurement, adds no other.
        """
        short = name.removeprefix("time/")
        if self._innermost.get(self._thread()) == short:
            return nullcontext()
        return self.span(short, "time" if name.startswith("time/") else "phase")

    @contextmanager
    def span(self, name: str, category: str) -> Iterator[None]:
        """Records the time of the body, and marks it in torch's trace if one is being recorded."""
        started, thread = time.perf_counter_ns(), self._thread()
        around, self._innermost[thread] = self._innermost.get(thread, ""), name
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            self._innermost[thread] = around
            self._events.append(
                {
                    "name": name,
                    "cat": category,
                    "ph": "X",
                    "ts": (self._start + started) / 1000,
                    "dur": (time.perf_counter_ns() - started) / 1000,
                    "pid": self._rank,
                    "tid": thread,
                }
            )

    def _thread(self) -> int:
        """Returns the index of the calling thread."""
        return self._threads.setdefault(threading.get_ident(), len(self._threads))

    def take(self) -> list[Event]:
        """Returns the spans that have ended since the last call."""
        events, self._events = self._events, []
        return events


def append_events(path: Path, events: Sequence[Event]) -> None:
    """Adds events to a trace file, which is valid JSON after each call, even one that the disk had no space for."""
    text = ",\n".join(map(json.dumps, events))
    if not path.exists():
        save_bytes(path, f"[\n{text}{_END}".encode())
        return
    size, added = path.stat().st_size, f",\n{text}{_END}".encode()
    try:
        with path.open("ab") as file:  # all that takes space comes before the end of the array is overwritten
            file.write(added[len(_END) :])
    except OSError:
        os.truncate(path, size)
        raise
    with path.open("r+b") as file:
        file.seek(size - len(_END))
        file.write(added[: len(_END)])


# ---- Traces of torch -------------------------------------------------------------------------------------------------


class TracedSteps:
    """Runs torch's profiler from the first to the last of some steps, and writes this rank's trace."""

    def __init__(self, steps: range, folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = steps, folder, rank
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Traces the body if it is one of the steps."""
        if number not in self._steps:
            yield
            return
        if self._profiler is None:
            self._start()
        try:
            yield
        finally:
            if number == self._steps[-1]:
                self._stop()

    def _start(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profiler = torch.profiler.profile(record_shapes=True)
        self._profiler.start()

    def _stop(self) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._folder / f"trace-rank-{self._rank}.json.gz"))
        self._profiler = None
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-rank-{self._rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
