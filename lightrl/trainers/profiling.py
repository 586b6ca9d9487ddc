"""Records where the time of a run goes (--profile): phases of every rank, traces of torch, memory of the GPU.

Nothing of it is entered by a run without the option: profile() puts itself around the methods of one trainer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from lightrl.config.profile_option import profiled_steps

Event = dict[str, Any]  # of the Trace Event Format, which Chrome and Perfetto read

_MEMORY_EVENTS = 200_000  # allocations that a snapshot remembers


def profile(trainer: Any) -> None:
    """Records the phases of the trainer from now on, and its chosen steps by torch; every rank calls it."""
    comm, folder = trainer.strategy.comm, trainer.folder.root / "profile"
    steps = profiled_steps(trainer.config.profile)
    with comm.phase("set-up", local=True):
        folder.mkdir(parents=True, exist_ok=True)
    timeline = Timeline(comm.rank)
    traced = TracedSteps(range(steps.start, min(steps.stop, trainer.config.max_steps + 1)), folder, comm.rank)
    trainer.watch.measure = _spanned(trainer.watch.measure, timeline, "time")
    comm.phase = _spanned(comm.phase, timeline, "phase")

    def write() -> None:
        gathered = comm.all_gather_object(timeline.take())
        if comm.is_main:
            append_events(folder / "timeline.json", [event for part in gathered for event in part])

    step, save_models = trainer.step, trainer.save_models

    def observed_step() -> Any:
        number = trainer.step_index + 1
        with traced.step(number), timeline.span(f"step {number}", "step"):
            report = step()
        write()
        return report

    def observed_save(folder: Path) -> None:
        save_models(folder)
        write()

    trainer.step, trainer.save_models = observed_step, observed_save


def _spanned(
    measure: Callable[..., AbstractContextManager[Any]], timeline: Timeline, category: str
) -> Callable[..., AbstractContextManager[Any]]:
    """Returns a context manager that also records its body as a span of the name that it is given."""

    @contextmanager
    def spanned(name: str, **options: Any) -> Iterator[Any]:
        with measure(name, **options) as measured, timeline.span(name.removeprefix("time/"), category):
            yield measured

    return spanned


# ---- Phases ----------------------------------------------------------------------------------------------------------


class Timeline:
    """The spans of one rank, in the time that all ranks share."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._start = time.time_ns() - time.perf_counter_ns()  # of the counter, which does not jump
        self._threads: dict[int, int] = {}
        self._events: list[Event] = [
            {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
            {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
        ]

    @contextmanager
    def span(self, name: str, category: str) -> Iterator[None]:
        """Records the time of the body, also in a trace of torch that is being made."""
        started = time.perf_counter_ns()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            self._events.append(
                {
                    "name": name,
                    "cat": category,
                    "ph": "X",
                    "ts": (self._start + started) / 1000,
                    "dur": (time.perf_counter_ns() - started) / 1000,
                    "pid": self._rank,
                    "tid": self._threads.setdefault(threading.get_ident(), len(self._threads)),
                }
            )

    def take(self) -> list[Event]:
        """Returns the spans that have ended since the last call."""
        events, self._events = self._events, []
        return events


def append_events(path: Path, events: Sequence[Event]) -> None:
    """Adds events to a trace, which is whole JSON after each call."""
    text = ",\n".join(map(json.dumps, events))
    if not path.exists():
        path.write_text(f"[\n{text}\n]\n")
        return
    with path.open("r+b") as file:
        file.seek(-len("\n]\n"), 2)
        file.write(f",\n{text}\n]\n".encode())


# ---- Traces of torch -------------------------------------------------------------------------------------------------


class TracedSteps:
    """Runs torch's profiler from the first to the last of some steps, and writes what it saw on this rank."""

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
