"""The program `lightrl report`: one HTML file about several runs, or a live view of a run in progress."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from lightrl.config import exit_with_user_error, print_text
from lightrl.config.paths import why_no_output
from lightrl.report.comparison import compare
from lightrl.report.diagnosis import diagnose
from lightrl.report.run_files import read_runs

_NEEDED = ("bokeh", "jinja2")


def main(arguments: Sequence[str]) -> int:
    """Writes the report of the runs in the given folders, or with --watch shows one run in the terminal."""
    options = _parser().parse_args(arguments)
    folders = [Path(name) for name in options.runs]
    try:
        if options.watch:
            return _watch(folders, options.seconds)
        _require_libraries()
        target = Path(options.output) if options.output else folders[0] / "report.html"
        if options.output and (problem := why_no_output(target)):
            raise ValueError(f"--output {target}: {problem}. Name another file.")
        runs = read_runs(folders)
        from lightrl.report.page import build_page  # noqa: PLC0415  (needs the extra, and takes seconds to import)

        page = build_page(runs)
        target.write_text(page, encoding="utf-8")
    except (ValueError, OSError) as error:
        exit_with_user_error(error)
    for sentence in compare(runs):
        print_text(sentence)
    for run in runs:
        for finding in diagnose(run):
            print_text(f"{run.name}: {finding.title}. {finding.text}")
    print_text(f"{target} ({len(page.encode()) / 1e6:.2f} MB): open it in a browser.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightrl report", description="Write one HTML file about runs: curves, samples, warnings, options."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run; several are compared")
    parser.add_argument("--output", metavar="FILE", help="file to write (default: report.html in the first run)")
    parser.add_argument("--watch", action="store_true", help="show a run in the terminal during the run")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds between updates of --watch (default: 2)")
    return parser


def _watch(folders: Sequence[Path], seconds: float) -> int:
    from lightrl.report.watch import watch  # noqa: PLC0415  (the page needs none of it)

    if len(folders) != 1:
        raise ValueError(f"--watch shows one run, and {len(folders)} are named.")
    return watch(folders[0], every_s=seconds)


def _require_libraries() -> None:
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f'The report is drawn by {name}, which is not installed. Install it: pip install "lightrl[report]". '
                "`lightrl report --watch RUN` needs nothing more."
            ) from error
