"""Uploads, to a hub on this machine."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import running_hub

from lightrl.checkpoint import CheckpointDirectory
from lightrl.trainers import export_run
from lightrl.trainers.hub_push import Repository


def test_a_folder_is_uploaded_and_the_token_is_never_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "README.md").write_text("---\ntags: [lightrl]\n---\n")
    (tmp_path / "config.json").write_text("{}")
    with running_hub(monkeypatch) as hub:
        repository = Repository("me/model", is_private=True)
        assert repository.upload(tmp_path, "step 3") == f"{hub.url}/me/model"
        ((name, message, files),) = hub.commits
        assert (name, message, sorted(files)) == ("me/model", "step 3", ["README.md", "config.json"])
        assert hub.tokens == {"Bearer hf_hunter2"}
        hub.refuses = True
        repository.upload_or_warn(tmp_path, "step 4")
        with pytest.raises(ValueError, match=r"--hub.push me/model: the hub takes no upload .* Log in by"):
            Repository("me/model", is_private=True)
    assert "was not uploaded to me/model" in caplog.text
    caplog.clear()
    repository.upload_or_warn(tmp_path, "step 5")  # nothing listens there any more
    assert "was not uploaded to me/model" in caplog.text
    with pytest.raises(ValueError, match=r"--hub.push me/model: the hub takes no upload .* Log in by"):
        Repository("me/model", is_private=True)
    assert "hunter2" not in caplog.text


def test_an_export_that_could_not_upload_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("max_steps: 1\n")
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    monkeypatch.setattr(CheckpointDirectory, "steps", lambda _: [1])
    with running_hub(monkeypatch) as hub:
        hub.refuses = True
        with pytest.raises(SystemExit, match="2"):
            export_run.main([str(tmp_path), "--hub.push", "me/model"])
    assert "--hub.push me/model: the hub takes no upload" in capsys.readouterr().err
    assert not (tmp_path / "exports").exists()


def test_a_run_that_could_not_upload_ends_before_it_begins(toy_flags: list[str], tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
    command = [sys.executable, str(script), *toy_flags, "--output_dir", str(tmp_path / "run"), "--hub.push", "me/model"]
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "error: --hub.push me/model: the hub takes no upload" in done.stderr
    assert "Traceback" not in done.stderr
