"""Curves with fewer points keep their ends."""

import pytest

pytest.importorskip("bokeh", reason="the report extra is not installed")

from pathlib import Path

from lightrl.report.charts import curves, thinned
from lightrl.report.run_files import read_run


def test_a_thinned_curve_keeps_its_peaks() -> None:
    pairs = [(step, 100.0 if step == 500 else step % 7) for step in range(1000)]
    kept = thinned(pairs, 100)
    assert len(kept) <= 102
    assert (500, 100.0) in kept
    assert kept == sorted(kept)
    assert thinned(pairs[:50], 100) == pairs[:50]


def test_every_metric_has_one_chart(run_folder: Path) -> None:
    run = read_run(run_folder)
    sections = curves([run], 2000)
    titles = [chart.title for section in sections for chart in section.charts]
    assert sorted(set(titles) - {"phases"}) == run.metric_names[: len(run.metric_names)]
    assert len(titles) == len(set(titles))
