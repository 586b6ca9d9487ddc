"""Why a path cannot be read or written."""

import os
from pathlib import Path

import pytest

from lightrl.config.paths import why_no_output, why_unreadable, why_unwritable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, a folder, a link that leads nowhere, and one that leads to itself."""
    (tmp_path / "file").write_text("")
    (tmp_path / "inner").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


LONG = "x" * 300
ABSENT = {  # what stands in the way of a path, whether it is to be read or to be made
    "link": "it is a broken symbolic link to nowhere",
    "loop": "it is a broken symbolic link to loop",
    "link/a/b": "{}/link is a broken symbolic link to nowhere",
    "file/a/b": "it is below the file {}/file",
    LONG: "File name too long",
    f"{LONG}/a": "File name too long",
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_in_the_way_is_named(name: str, folder: Path) -> None:
    text = ABSENT[name].format(folder)
    assert why_unreadable(folder / name) == why_unreadable(folder / name, is_folder=True) == text
    assert why_unwritable(folder / name) == why_no_output(folder / name) == text


def test_what_is_missing_can_be_made_but_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unreadable(folder / "a") == "there is no such file"
    assert why_unreadable(folder / "a", is_folder=True) == "there is no such folder"
    assert why_unwritable(folder / "a" / "b") == why_no_output(folder / "a") == ""
    assert why_no_output(folder / "a" / "b") == f"there is no folder {folder}/a"
    monkeypatch.chdir(folder)
    assert why_unwritable("a") == ""


def test_files_are_no_folders(folder: Path) -> None:
    assert why_unreadable(folder / "file") == why_unreadable(folder / "inner", is_folder=True) == ""
    assert why_unreadable(folder / "inner") == why_no_output(folder / "inner") == "it is a folder, not a file"
    assert why_unreadable(folder / "file", is_folder=True) == "it is a file, not a folder"
    assert why_unreadable("/dev/null") == "it is a device or a pipe, not a file"
    assert why_no_output(folder / "file") == ""


def test_rights_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may do everything
    assert why_unreadable(folder / "file") == "it may not be read (Permission denied)"
    assert why_unwritable(folder / "a" / "b") == f"{folder} takes no files (Permission denied)"
    assert why_no_output(folder / "file") == "it may not be replaced (Permission denied)"
    asked: dict[str, int] = {}
    monkeypatch.setattr(os, "access", lambda path, mode: asked.update({str(path): mode}) or True)
    why_unreadable(folder / "file")
    why_unreadable(folder / "inner", is_folder=True)
    why_unwritable(folder / "a" / "b")
    names = {"file": os.R_OK, "inner": os.R_OK | os.X_OK, "": os.W_OK | os.X_OK}
    assert asked == {str(folder / name): mode for name, mode in names.items()}
