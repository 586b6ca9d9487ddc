"""What rank 0 shows a person: a progress bar on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_LINES_PER_RUN = 20  # where there is no terminal, a line per so many-th of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Names of the metrics that a trainer shows."""

    step: tuple[str, ...] = ("reward/mean", "tokens/per_second", "entropy")
    evaluation: tuple[str, ...] = ("eval/accuracy", "eval/reward")
    table: tuple[str, ...] = ("eval/accuracy", "reward/mean", "entropy")  # the first has a bar, out of 1


class RunConsole:
    """Silent on every rank but 0."""

    def __init__(self, shown: Shown, *, enabled: bool, first_step: int, max_steps: int) -> None:
        self._shown = shown
        self._console = Console(quiet=not enabled, highlight=False)
        self._every = max(1, max_steps // _LINES_PER_RUN)
        self._max_steps = max_steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not enabled or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=max_steps, completed=first_step, status="")

    def __enter__(self) -> RunConsole:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """step counts finished steps."""
        texts = [_text(name, metrics[name]) for name in self._shown.step if name in metrics]
        self._progress.update(self._task, completed=step, status="  ".join(texts[:2]))
        if not self._console.is_terminal and (step % self._every == 0 or step == self._max_steps):
            self.say("  ".join([f"step {step}/{self._max_steps}", *texts]))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        found = [name for name in self._shown.evaluation if name in metrics]
        self.say("  ".join([f"step {step}", *(f"{name} {metrics[name]:.3f}" for name in found)]))

    def final_table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The evaluations of the run."""
        first, *others = self._shown.table
        table = Table("step", first, "", *others, "seconds")
        seconds = 0.0
        for row in rows:
            seconds += row.get("time/step") or 0.0
            if row.get(first) is not None:
                bar = "#" * round(20 * min(max(row[first], 0.0), 1.0))
                table.add_row(
                    str(row["step"]), _cell(row, first), bar, *(_cell(row, name) for name in others), f"{seconds:.0f}"
                )
        if table.row_count:
            self._console.print(table)


def _text(name: str, value: float) -> str:
    return f"{value:,.0f} tokens/s" if name == "tokens/per_second" else f"{name.removesuffix('/mean')} {value:.3f}"


def _cell(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.3f}" if row.get(name) is not None else ""
