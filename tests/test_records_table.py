"""The table of benchmarks/records.md keeps the fastest run of each task and side."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
HEAD = "| Task | Accuracy | By | Versions | Steps | Seconds | CPU seconds | Day | Processor |\n" + 9 * "|---" + "|\n"


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "records", raising=False)
    import records

    return records


def row(records, cpu: float, *, side: str = "lightrl", reached: bool = True) -> str:  # type: ignore[no-untyped-def]
    found = {"reached": reached, "after": 0.5, "steps": 20, "seconds": 9.0, "cpu": cpu}
    return records.row_of(records.TASKS[0], side, "1.0", found)


def test_a_row_replaces_only_a_slower_one_of_its_task_and_side(records) -> None:  # type: ignore[no-untyped-def]
    slow, fast, theirs = row(records, 12.0), row(records, 8.0), row(records, 1.0, side="trl")
    page = records.keep_best(records.keep_best(HEAD, slow), theirs)
    assert page == f"{HEAD}{slow}\n{theirs}\n"
    assert records.keep_best(page, fast) == f"{HEAD}{fast}\n{theirs}\n"
    assert records.keep_best(page, row(records, 13.0)) == page
    assert records.keep_best(page, row(records, 1.0, reached=False)) == page


def test_a_run_that_reaches_the_goal_beats_one_that_does_not(records) -> None:  # type: ignore[no-untyped-def]
    missed, reached = row(records, 1.0, reached=False), row(records, 50.0)
    assert records.keep_best(f"{HEAD}{missed}\n", reached) == f"{HEAD}{reached}\n"


def test_evaluations_are_not_counted(records, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The clock reads 0, then 3 s after the first evaluation, so that a step of 2 s ends at 5 s."""
    times = iter([0.0, 3.0, 5.0])
    monkeypatch.setattr(records.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(records.time, "process_time", lambda: 0.0)
    watch = records.Stopwatch(goal=0.9)
    watch.evaluate(lambda: 0.1)
    with pytest.raises(records.Reached):
        watch.evaluate(lambda: 0.9)
    assert watch.wall == 2.0
