"""What rank 0 shows a person: a progress bar on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_LINES_PER_RUN = 20  # where there is no terminal, a line per so many-th of the run


class RunConsole:
    """Silent on every rank but 0."""

    def __init__(self, *, enabled: bool, first_step: int, max_steps: int) -> None:
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
        status = f"reward {metrics['reward/mean']:.3f}  {metrics['tokens/per_second']:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step % self._every == 0 or step == self._max_steps):
            self.say(f"step {step}/{self._max_steps}  {status}  entropy {metrics['entropy']:.3f}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.say(f"step {step}  eval/accuracy {metrics['eval/accuracy']:.3f}  eval/reward {metrics['eval/reward']:.3f}")

    def final_table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The evaluations of the run."""
        table = Table("step", "eval/accuracy", "", "reward/mean", "entropy", "seconds")
        seconds = 0.0
        for row in rows:
            seconds += row.get("time/step") or 0.0
            if "eval/accuracy" in row:
                bar = "#" * round(20 * row["eval/accuracy"])
                cells = [_cell(row, name) for name in ("eval/accuracy", "reward/mean", "entropy")]
                table.add_row(str(row["step"]), cells[0], bar, cells[1], cells[2], f"{seconds:.0f}")
        if table.row_count:
            self._console.print(table)


def _cell(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.3f}" if row.get(name) is not None else ""
