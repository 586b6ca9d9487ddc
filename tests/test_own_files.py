from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from lightrl.own_files import is_of_file, run_file


def test_a_file_is_run_once_and_anew_after_a_change(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine: ...\n")
    module = run_file(path)
    assert run_file(tmp_path / "." / "mine.py") is module
    assert type(pickle.loads(pickle.dumps(module.Mine()))) is module.Mine
    assert is_of_file(module.Mine.__module__)
    assert not is_of_file("pickle")
    path.write_text("VALUE = 2\n")
    assert run_file(path).VALUE == 2


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"VALUE = {name!r}\n")
    assert [run_file(tmp_path / name / "mine.py").VALUE for name in ("a", "b")] == ["a", "b"]


def test_a_file_that_fails_leaves_no_module(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("exit(0)\n")
    with pytest.raises(SystemExit):
        run_file(path)
    assert not [name for name in sys.modules if is_of_file(name) and "broken" in name]
