"""Reads the files that a run has written into its folder, even while the run is still writing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.config import nearest_name
from lightrl.config.command_line import flatten
from lightrl.config.paths import why_unreadable
from lightrl.config.yaml_text import read_yaml
from lightrl.trainers.loggers.attach import public

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The content of a run's files."""

    name: str  # different from that of every other run in the report
    root: Path
    config: Mapping[str, Any]  # by the full name of the option, without secrets
    metrics: Sequence[Row]  # a row per step, ascending
    samples: Sequence[Row]
    timeline: Sequence[Row] = ()  # events of profile/timeline.json
    damaged: tuple[str, ...] = ()  # sentences about lines that could not be read

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Returns (step, value) pairs for the steps that have the metric."""
        return [(row["step"], row[metric]) for row in self.metrics if _is_number(row.get(metric))]

    @property
    def metric_names(self) -> list[str]:
        """The names of all metrics of all steps, sorted."""
        return sorted({name for row in self.metrics for name in row} - {"step"})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Reads the runs; raises ValueError for a folder that is not a run."""
    names = _short_names(folders)
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(root: Path, name: str = "", *, sample_bytes: int | None = None) -> RunFiles:
    """Reads a run; raises ValueError if the folder is not a run. Damaged or incomplete lines are left out.

    Args:
        sample_bytes: how much of the end of samples.jsonl is read; None reads it whole.
    """
    if not all(os.path.isfile(root / name) for name in ("config.yaml", "metrics.jsonl")):
        raise ValueError(_describe_no_run(root))
    options = read_yaml(root / "config.yaml", "it") or {}
    metrics, lost_metrics = _rows(root / "metrics.jsonl")
    samples, lost_samples = _rows(root / "samples.jsonl", sample_bytes)
    timeline, lost_events = _events(root / "profile" / "timeline.json")
    return RunFiles(
        name=name or root.name,
        root=root,
        config={option: public(option, value) for option, value in flatten(options)},
        metrics=metrics,
        samples=samples,
        timeline=timeline,
        damaged=(*lost_metrics, *lost_samples, *lost_events),
    )


def _rows(path: Path, most_bytes: int | None = None) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    lost = 0
    lines = _end_of(path, most_bytes).decode(errors="replace").split("\n") if path.exists() else []
    for line in lines:
        row = _object(line)
        if row is not None and isinstance(row.get("step"), int):
            rows.append(row)
        elif line.strip() and line is not lines[-1]:  # the last line of a run in progress may be half written
            lost += 1
    return rows, [f"{path.name}: {lost} damaged lines are left out."] if lost else []


def _end_of(path: Path, most_bytes: int | None) -> bytes:
    """Returns the last whole lines of a file, in at most that many bytes."""
    with path.open("rb") as file:
        left = path.stat().st_size - (math.inf if most_bytes is None else most_bytes)
        if left <= 0:
            return file.read()
        file.seek(int(left) - 1)  # the line end before the first whole line may be its last byte
        file.readline()
        return file.read()


def _object(text: str) -> dict[str, Any] | None:
    """Returns the object of a line, with None for NaN and infinities, which a browser's JSON does not allow."""
    try:
        found = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _events(path: Path) -> tuple[list[Row], list[str]]:
    """Returns the spans of a Chrome trace."""
    if not path.is_file():
        return [], []
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return [], [f"profile/{path.name} is damaged and left out."]
    return [item for item in found if isinstance(item, dict) and item.get("ph") == "X"], []


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that distinguish the runs; equal paths get numbers."""
    paths = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders, start=1)]


def _describe_no_run(root: Path) -> str:
    if problem := why_unreadable(root, is_folder=True):
        beside = set() if why_unreadable(root.parent, is_folder=True) else {path.name for path in root.parent.iterdir()}
        hint = nearest_name(root.name, beside) if beside and not os.path.lexists(root) else ""
        return f"{root}: {problem}. {hint}".rstrip()
    found = sorted(path.parent for path in root.glob("*/config.yaml"))
    inside = f" Did you mean {found[-1]}?" if found else ""
    return f"{root} is no folder of a run that has begun: it has no config.yaml with metrics.jsonl beside it.{inside}"
