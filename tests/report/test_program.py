"""The arguments of `lightrl report`, and what it says about them."""

import sys
from pathlib import Path

import pytest

from lightrl.programs import main


def test_mistakes_end_with_2(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["report"], "required: RUN"),
        (["report", str(run_folder / "nowhere")], "there is no such folder"),
        (["report", str(run_folder), "--output", "no/a.html"], "--output no/a.html: there is no folder"),
        (["report", "--watch", str(run_folder), str(run_folder)], "--watch shows one run, and 2 are named"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run_folder)])
    assert ended.value.code == 2
    assert 'pip install "lightrl[report]"' in capsys.readouterr().err
    assert main(["report", "--watch", str(run_folder)]) == 0
