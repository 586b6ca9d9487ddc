"""What is read from a run's folder."""

from pathlib import Path

import pytest

from lightrl.report.run_files import read_run, read_runs


def test_damaged_lines_are_left_out_and_counted(run_folder: Path) -> None:
    metrics = run_folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"no": "step"}\nnonsense\n{"step": 31, "reward/mean": 0.')
    run = read_run(run_folder)
    assert [row["step"] for row in run.metrics] == list(range(1, 31))
    assert run.damaged == ("metrics.jsonl: 2 damaged lines are left out.",)  # the last line is being written


def test_the_end_of_the_samples_begins_with_a_whole_line(run_folder: Path) -> None:
    lines = [b'{"step": %d, "prompt": "%s"}' % (step, "\u00e9".encode() * step) for step in range(5)]
    (run_folder / "samples.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    last, total = len(lines[-1]) + 1, (run_folder / "samples.jsonl").stat().st_size
    for most, wanted in (
        (last, [4]),
        (last - 1, []),
        (last + 1, [4]),
        (total - 1, [1, 2, 3, 4]),
        (total, list(range(5))),
    ):
        run = read_run(run_folder, sample_bytes=most)
        assert ([row["step"] for row in run.samples], run.damaged) == (wanted, ())


def test_values_skip_what_is_missing(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").write_text('{"step": 0, "a": 1.5}\n{"step": 1, "a": null}\n{"step": 2, "a": 2}\n')
    run = read_run(run_folder)
    assert run.values("a") == [(0, 1.5), (2, 2)]
    assert run.config["algorithm.loss"] == "ppo_clip"


def test_numbers_that_no_browser_reads_are_missing(run_folder: Path) -> None:
    """Python writes them, as in an answer of a Parquet file; JSON.parse would refuse all samples for one."""
    (run_folder / "samples.jsonl").write_text('{"step": 1, "answer": {"low": NaN, "of": [1.5, -Infinity]}}\n')
    assert read_run(run_folder).samples == [{"step": 1, "answer": {"low": None, "of": [1.5, None]}}]


def test_secrets_among_the_options_are_masked(run_folder: Path) -> None:
    text = "engine_args: [api_key=hunter2, seed=1]\njudge:\n  url: https://me:hunter2@host/v1\n"
    (run_folder / "config.yaml").write_text(text)
    assert read_run(run_folder).config == {
        "engine_args": ["api_key=***", "seed=1"],
        "judge.url": "https://***@host/v1",
    }


def test_runs_get_names_that_tell_them_apart(tmp_path: Path, run_folder: Path) -> None:
    other = tmp_path / "other" / "run"
    other.parent.mkdir()
    run_folder.rename(other)
    third = tmp_path / "third" / "run"
    third.mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (third / name).write_text((other / name).read_text())
    assert [run.name for run in read_runs([other, third])] == ["other/run", "third/run"]
    assert [run.name for run in read_runs([other, other])] == ["run (1)", "run (2)"]


def test_a_folder_that_is_no_run_names_one_inside(run_folder: Path) -> None:
    with pytest.raises(ValueError, match=f"is no folder of a run that has begun.*Did you mean {run_folder}"):
        read_run(run_folder.parent)
    with pytest.raises(ValueError, match="rum: there is no such folder. Did you mean run"):
        read_run(run_folder.with_name("rum"))
