"""Files that a run names, and a warning when they change while it is interrupted."""

import json
from pathlib import Path

import pytest

from lightrl.config import AlgorithmConfig, DataConfig, GRPOConfig, RolloutLogConfig, WorkflowConfig
from lightrl.trainers import run_folder
from lightrl.trainers.run_folder import hash_of, note_inputs


def test_changed_data_and_code_are_told_when_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a.jsonl", "b-1.jsonl", "b-2.jsonl", "mine.py", "game_of_inputs.py", "own.jinja"):
        Path(name).write_text(f"# {name}\n")
    workflow = WorkflowConfig(
        workflow="environment", workflow_args=("environment=game_of_inputs:Game", "url=http://127.0.0.1:80")
    )
    config = GRPOConfig(
        train_data="a.jsonl + b-*.jsonl*2",
        reward=("mine.py:good=0.5", "length"),
        rollout=workflow,
        data=DataConfig(chat_template_file="own.jinja"),
    )
    run = tmp_path / "run"
    run.mkdir()
    note_inputs(run, config, continues=True)  # a run of a version that wrote none
    known = json.loads((run / "inputs.json").read_text())
    game = str(tmp_path / "game_of_inputs.py")
    assert set(known) == {"a.jsonl", "b-1.jsonl", "b-2.jsonl", "mine.py", "own.jinja", game}
    note_inputs(run, config, continues=True)
    assert not caplog.records
    for name in ("b-2.jsonl", "mine.py", "own.jinja"):
        Path(name).write_text("another line\n")
    note_inputs(run, config, continues=True)
    assert "b-2.jsonl, mine.py, own.jinja changed since this run began" in caplog.text
    caplog.clear()
    note_inputs(run, config, continues=True)  # told once
    Path("a.jsonl").write_text("another line\n")
    note_inputs(run, config, continues=False)  # it begins anew
    assert not caplog.records


def test_the_code_of_every_option_that_changes_steps_is_an_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["engine", "advantage", "loss", "aggregation", "correction", "kl_estimator", "filter", "curriculum"]
    Path("my files").mkdir()
    paths = {option: f"my files/{option}.py" for option in (*options, "strategy", "workflow", "tool", "logger")}
    for path in paths.values():
        Path(path).touch()
    named = {option: f"{path}:mine" for option, path in paths.items()}
    config = GRPOConfig(
        strategy=named["strategy"],
        engine=named["engine"],
        algorithm=AlgorithmConfig(**{option: named[option] for option in options[1:6]}, kl_coef=0.1),
        data=DataConfig(curriculum=named["curriculum"]),
        log=RolloutLogConfig(to=named["logger"]),  # no step depends on it
        rollout=WorkflowConfig(
            filter=named["filter"],
            workflow=named["workflow"],
            workflow_args=(f"tools=[missing.module:other, {named['tool']}]",),
        ),
    )
    note_inputs(tmp_path, config, continues=False)
    assert set(json.loads(Path("inputs.json").read_text())) == set(paths.values()) - {paths["logger"]}


def test_a_large_file_is_read_in_blocks_from_first_to_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_WHOLE", 128)  # 64 blocks of 2 bytes
    file = tmp_path / "large"

    def hash_with(place: int) -> str:
        content = bytearray(1000)
        content[place] = 1
        file.write_bytes(content)
        return hash_of(file)

    zeros = {}
    for size in (1000, 1001):
        file.write_bytes(bytes(size))
        zeros[size] = hash_of(file)
    assert zeros[1000] != zeros[1001]
    assert len({hash_with(0), hash_with(1), hash_with(998), hash_with(999), zeros[1000]}) == 5
    assert hash_with(3) == zeros[1000]  # between two blocks: the price of not reading it all
