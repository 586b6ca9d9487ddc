"""`lightrl export`; tests/trainers/test_export.py exports a run."""

from pathlib import Path

import pytest

from lightrl.trainers.export_run import main


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("num_prompts: 2\n")
    for words, wanted in (
        (["nowhere"], "nowhere is no folder of a run"),
        ([str(tmp_path / "run")], "has no checkpoint. There is none"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert wanted in capsys.readouterr().err
