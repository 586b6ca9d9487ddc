"""The schedule of an asynchronous run: which samples were made under which weights, and which batch took them.

It is a file in the run's folder with a line of JSON for each step. It makes the run repeatable: a draw depends only on
the seed, the ticket, the sample and the token, and each line names the weights that made the tokens.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightrl.records import ScoredGroup, Status

SCHEDULE = "schedule.jsonl"

Calls = Sequence[Sequence[Sequence[Sequence[int]]]]  # for each sample of a group: its calls, as in RecordedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSample:
    """How a sample was made."""

    sample_index: int
    calls: tuple[tuple[tuple[int, int], ...], ...]  # for each call: its (version, number of tokens) runs, in order
    status: Status = Status.COMPLETED

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The (version, number of tokens) runs of a single-turn sample, which has only one call."""
        return self.calls[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """How a group was made, and a digest of the result."""

    ticket: int
    start_version: int
    samples: tuple[RecordedSample, ...]
    digest: str  # of the tokens of all samples
    prompt: int | None = None  # data index; None in schedules of older versions, in which the ticket decides


def digest_of(group: ScoredGroup) -> str:
    """Returns a text that is the same for two groups only if their tokens are the same."""
    content = hashlib.sha256()
    for sample in sorted(group.samples, key=lambda sample: sample.sample_index):
        content.update(np.array([len(sample.response_ids), *sample.response_ids], dtype="<i8").tobytes())
    return content.hexdigest()[:16]


class ScheduleLog:
    """Writes the schedule of a run."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SCHEDULE
        self._is_open = False

    def append(self, step: int, groups: Sequence[ScoredGroup], calls: Sequence[Calls]) -> None:
        """Adds the batch of a step. `step` counts from 0, but the step in the line from 1, as in metrics.jsonl."""
        if not self._is_open:
            self._drop_from(step)
        row = {"step": step + 1, "groups": [_as_json(*made) for made in zip(groups, calls, strict=True)]}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _drop_from(self, step: int) -> None:
        """Drops the lines that an interrupted run wrote after the checkpoint from which this run continues."""
        if self._path.is_file():
            os.truncate(self._path, _end_of(self._path, step))
        self._is_open = True


def _end_of(path: Path, step: int) -> int:
    """Returns the offset at which the lines up to a step end. In a long file, only later lines are read."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1  # a kill may have truncated the last line
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            if json.loads(content[start:end])["step"] <= step:
                break
            end = start
        return end


def read_schedule(folder: Path) -> list[tuple[RecordedGroup, ...]]:
    """Returns the batch of each step; raises ValueError for a run without a schedule."""
    path = folder / SCHEDULE
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {SCHEDULE}: it is no run with --rollout.max_staleness above 0, which alone needs a "
            "schedule to be repeated. Start any other run again with its config.yaml."
        )
    steps = [json.loads(line) for line in _lines(path)]
    return [tuple(_from_json(group) for group in row["groups"]) for row in steps]


def _lines(path: Path) -> list[str]:
    """Returns the complete lines of a file; a kill may have truncated the last one."""
    if not path.is_file():
        return []
    return [line[:-1] for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def _as_json(group: ScoredGroup, calls: Calls) -> dict[str, Any]:
    left_out = {
        str(sample.sample_index): sample.status.value
        for sample in group.samples
        if sample.status is not Status.COMPLETED
    }
    row = {
        "ticket": group.ticket,
        "start_version": group.start_version,
        "digest": digest_of(group),
        "prompt": group.samples[0].prompt.index,
        "samples": [[sample.sample_index, *own] for sample, own in zip(group.samples, calls, strict=True)],
    }
    return {**row, "left_out": left_out} if left_out else row


def _from_json(row: dict[str, Any]) -> RecordedGroup:
    return RecordedGroup(
        ticket=row["ticket"],
        start_version=row["start_version"],
        digest=row["digest"],
        prompt=row.get("prompt"),
        samples=tuple(
            RecordedSample(
                sample_index=index,
                calls=tuple(tuple((version, count) for version, count in call) for call in calls),
                status=Status(row.get("left_out", {}).get(str(index), "completed")),
            )
            for index, *calls in row["samples"]
        ),
    )
