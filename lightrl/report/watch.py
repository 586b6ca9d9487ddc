"""Shows a run in progress in the terminal, from the files that it writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightrl.report.diagnosis import diagnose
from lightrl.report.run_files import RunFiles, read_run
from lightrl.trainers.earlier_run import last_step

_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_WIDTH = 48  # columns of a curve
_SHOWN = (
    *("reward/mean", "eval/accuracy", "reward/equal_groups", "episode/failed_share", "loss", "accuracy"),
    *("entropy", "kl", "clip_fraction", "grad_norm", "mismatch/mean_abs"),
    *("tokens/response_mean", "tokens/truncated", "tokens/per_second", "time/step"),
)
_NUM_SAMPLES = 4
_SAMPLE_BYTES = 4_000_000  # of the end of samples.jsonl, which is read at each update beside the run


def watch(folder: Path, *, every_s: float) -> int:
    """Shows the run until its last step or Ctrl-C; if standard output is not a terminal, shows it once."""
    console = Console(highlight=False)
    run = read_run(folder, sample_bytes=_SAMPLE_BYTES)
    if not console.is_terminal:
        console.print(view(run))
        return 0
    try:
        with Live(view(run), console=console, screen=False, auto_refresh=False) as live:
            while not is_done(run):
                time.sleep(every_s)
                run = read_run(folder, sample_bytes=_SAMPLE_BYTES)
                live.update(view(run), refresh=True)
    except KeyboardInterrupt:
        return 0
    console.print(f"{folder} has made its last step. `lightrl report {folder}` writes it as a page.", markup=False)
    return 0


def is_done(run: RunFiles) -> bool:
    """Returns whether the run has made its last step."""
    last = last_step(run.config, run.metrics)
    return last is not None and bool(run.metrics) and run.metrics[-1]["step"] >= last


def view(run: RunFiles) -> RenderableType:
    """Returns a view of the run so far: its curves, what they show, and the newest samples."""
    step = run.metrics[-1]["step"] if run.metrics else 0
    seconds = [value for _, value in run.values("time/step")]
    last = last_step(run.config, run.metrics)
    left = max(0, (last or step) - step)
    ends = f", about {left * sum(seconds[-10:]) / len(seconds[-10:]):.0f} s left" if seconds and left else ""
    title = f"{run.name}: step {step} of {'?' if last is None else last}{ends}"
    return Group(Panel(_curves(run), title=Text(title), title_align="left"), _findings(run), _samples(run))


def _curves(run: RunFiles) -> Table:
    table = Table("", "first", "last", "", box=None, pad_edge=False)
    for metric in _SHOWN:
        values = [value for _, value in run.values(metric)]
        if values:
            table.add_row(metric, f"{values[0]:.4g}", f"{values[-1]:.4g}", sparkline(values, _WIDTH))
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws a curve in a line of text: a bar for the mean of each of `width` stretches of the values."""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    if low == high:
        return _BARS[0] * len(means)
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def _findings(run: RunFiles) -> Text:
    text = Text()
    for finding in diagnose(run):
        color = {"warning": "yellow", "good": "green", "note": "default"}[finding.level]
        text.append(f"{finding.title}. ", style=f"bold {color}").append(f"{finding.text}\n")
    return text


def _samples(run: RunFiles) -> Table:
    table = Table("reward", "prompt", "response", title="newest samples", title_justify="left", expand=True)
    for item in run.samples[-_NUM_SAMPLES:]:
        reward = item.get("reward")
        cells = (str(item.get(name) or "")[-120:] for name in ("prompt", "response"))
        table.add_row("none" if reward is None else f"{reward:.3g}", *(Text(cell) for cell in cells))
    return table
