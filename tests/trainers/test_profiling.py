"""The traces of --profile are JSON of the Trace Event Format, and tokens are logged with their values."""

import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_run_folder import small_disk

from lightrl.comm import Comm
from lightrl.config import EvalConfig, GRPOConfig, RolloutLogConfig
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.profiling import Profile, Timeline, append_events


def check_trace(events: list[dict[str, Any]]) -> None:
    """Raises AssertionError unless these are events of the Trace Event Format."""
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] > 0
            assert event["dur"] >= 0
        else:
            assert event["ph"] == "M"
            assert event["args"]


def test_spans_of_several_calls_are_one_trace(tmp_path: Path) -> None:
    timeline = Timeline(3)
    with timeline.span("outer", "step"), timeline.span("inner", "phase"):
        pass
    append_events(tmp_path / "timeline.json", timeline.take())
    with pytest.raises(KeyError), timeline.span("failed", "phase"):
        raise KeyError
    append_events(tmp_path / "timeline.json", timeline.take())
    events = json.loads((tmp_path / "timeline.json").read_text())
    check_trace(events)
    inner, outer, failed = events[2:]
    assert [event["name"] for event in (inner, outer, failed)] == ["inner", "outer", "failed"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert {event["pid"] for event in events} == {3}


def test_a_traced_step_that_fails_has_its_trace(tmp_path: Path) -> None:
    comm = Comm()
    config = SimpleNamespace(profile="2", max_steps=3)
    folder = SimpleNamespace(root=tmp_path)
    profile = Profile(SimpleNamespace(strategy=SimpleNamespace(comm=comm), folder=folder, config=config))
    with profile.around_step(1), comm.span("time/learn"), comm.phase("learn"), comm.phase("packing"):
        pass
    with pytest.raises(KeyError), profile.around_step(2), comm.phase("failing"):
        raise KeyError
    assert (tmp_path / "profile" / "trace-rank-0.json.gz").is_file()
    profile.after_export(tmp_path)
    events = json.loads((tmp_path / "profile" / "timeline.json").read_text())
    spans = [(event["name"], event["cat"]) for event in events if event["ph"] == "X"]
    assert spans == [
        ("packing", "phase"), ("learn", "time"), ("step 1", "step"), ("failing", "phase"), ("step 2", "step")
    ]  # fmt: skip


def test_a_run_writes_its_traces_and_tokens(toy: Path, tmp_path: Path) -> None:
    """One run has both options, since each costs the start of a trainer."""
    config = GRPOConfig(
        model=str(toy / "model"),
        train_data=str(toy / "train.jsonl"),
        reward=(f"{toy / 'reward.py'}:odd_digits", "length=0.5"),
        reward_args=("length.target=2",),
        num_prompts=4,
        group_size=3,
        num_epochs=2,
        max_steps=3,
        lr=1e-2,
        output_dir=str(tmp_path / "run"),
        eval=EvalConfig(every=0),
        log=RolloutLogConfig(tensorboard=False, samples_per_step=4, tokens=True),
        profile="2-9",  # the run ends before
    )
    trainer = GRPOTrainer(config)
    trainer.fit()
    trainer.close()
    events = json.loads((tmp_path / "run" / "profile" / "timeline.json").read_text())
    check_trace(events)
    names = [event["name"] for event in events]
    assert [name for name in names if name.startswith("step ")] == ["step 1", "step 2", "step 3"]
    assert {"rollout", "learn", "sync", "reward odd_digits"} <= set(names)
    assert names.count("learn") == 3
    with gzip.open(tmp_path / "run" / "profile" / "trace-rank-0.json.gz") as file:
        traced = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"step 2", "step 3", "learn", "aten::mm"} <= traced
    assert "step 1" not in traced

    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    for row in rows:
        tokens = row["tokens"]
        assert len({len(values) for values in tokens.values()}) == 1
        assert tokens["version"] == [row["version"]] * len(tokens["text"])
        assert tokens["advantage"] == pytest.approx([row["advantage"]] * len(tokens["text"]), rel=1e-3, abs=1e-6)
        assert row["reward"] == pytest.approx(row["rewards"]["odd_digits"] + 0.5 * row["rewards"]["length"])
        assert tokens["engine_ratio"] == pytest.approx([1.0] * len(tokens["text"]), abs=1e-3)  # before any update
        assert all(math.isfinite(value) for value in tokens["ratio"])
    moved = [abs(value - 1) for row in rows for value in row["tokens"]["ratio"]]
    assert max(moved) > 1e-4  # the second epoch's policy against the one before the first


def test_a_disk_that_is_full_leaves_what_was_written_and_the_next_start_goes_on(tmp_path: Path) -> None:
    path, spans = tmp_path / "timeline.json", [{"name": "step 1"}]
    with small_disk(0), pytest.raises(OSError, match="too large"):
        append_events(path, spans)
    append_events(path, spans)
    with small_disk(path.stat().st_size + 2000), pytest.raises(OSError, match="too large"):
        append_events(path, spans * 1000)  # of which a part fits
    assert json.loads(path.read_text()) == spans
    append_events(path, spans)
    assert json.loads(path.read_text()) == [*spans, *spans]
