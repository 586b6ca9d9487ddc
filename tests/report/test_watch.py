"""A run in the terminal."""

import io
from pathlib import Path

from rich.console import Console

from lightrl.report.run_files import read_run
from lightrl.report.watch import is_done, sparkline, view, watch


def test_a_curve_in_a_line() -> None:
    assert sparkline([0.0, 1.0, 2.0], 10) == "\u2581\u2585\u2588"  # the middle is the 4th of 7 steps: 3.5 is even to 4
    assert sparkline([1.0] * 4, 2) == "\u2581\u2581"
    assert len(sparkline([float(i) for i in range(1000)], 48)) == 48


def test_the_view_has_curves_findings_and_samples(run_folder: Path) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(view(read_run(run_folder)))
    text = console.export_text()
    assert "run: step 30 of 30" in text
    assert "reward/mean" in text
    assert "The reward stopped rising at about step" in text
    assert "<img src=x onerror=" in text


def test_it_ends_with_the_run(run_folder: Path) -> None:
    assert is_done(read_run(run_folder))
    assert watch(run_folder, every_s=0.01) == 0
