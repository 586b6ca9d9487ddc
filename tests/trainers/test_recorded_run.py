from pathlib import Path

import pytest

from lightrl.config import GRPOConfig, SFTConfig, to_yaml
from lightrl.trainers import recorded_run
from lightrl.trainers.recorded_run import replay


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [str(tmp_path)]):
        with pytest.raises(SystemExit) as error:
            replay(arguments)
        assert error.value.code == 2
        assert "is no folder of a run: give one" in capsys.readouterr().err


def test_a_run_is_not_repeated_into_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(f"output_dir: {tmp_path}\nmax_steps: 2\n")
    with pytest.raises(SystemExit):
        replay([str(tmp_path)])
    told = capsys.readouterr().err
    assert "Give --output_dir: a folder for the repeated run" in told
    assert "or --step N to repeat one step" in told


def test_a_repeated_run_uploads_and_reports_nothing_unless_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = "hub:\n  push: me/model\nlog:\n  to: my_package:MyLogger\nexport:\n  every: 2\n"
    (tmp_path / "config.yaml").write_text(f"max_steps: 4\n{kept}")
    started: list[GRPOConfig] = []
    monkeypatch.setattr(recorded_run, "run_program", lambda _build, config: started.append(config))
    new = ["--output_dir", str(tmp_path / "new")]
    replay([str(tmp_path), *new])
    replay([str(tmp_path), *new, "--hub.push", "me/again"])
    assert [(config.hub.push, config.log.to) for config in started] == [("", ""), ("me/again", "")]
    assert [config.export.every for config in started] == [2, 2]  # into the new folder


def test_a_run_that_learned_from_its_data_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(SFTConfig()))
    with pytest.raises(SystemExit):
        replay([str(tmp_path), "--step", "2"])
    assert "only runs of GRPO and PPO can be repeated" in capsys.readouterr().err


def test_a_step_is_counted_from_1_and_a_debugger_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("max_steps: 2\n")
    for words, wanted in ((["--step", "0"], "0: steps count from 1"), (["--debug"], "--debug stops before one step")):
        with pytest.raises(SystemExit, match="2"):
            replay([str(tmp_path), "--output_dir", str(tmp_path / "new"), *words])
        assert wanted in capsys.readouterr().err
