from pathlib import Path

import pytest

from lightrl.imports import is_installed, load_object

BUILTIN = {"sampler": "lightrl.data.sampler:PromptSampler"}


def load(name: str) -> object:
    return load_object(name, builtin=BUILTIN, what="thing", example="MyThing")


def test_built_in_names_and_import_paths_load_alike() -> None:
    assert load("sampler") is load("lightrl.data.sampler:PromptSampler")


def test_a_folder_is_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("only_a_folder")
    assert not is_installed("nowhere_at_all")
    assert is_installed("lightrl")
    assert is_installed("json")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sampler2", "Unknown thing 'sampler2'. Did you mean sampler\\?.*package.module:MyThing"),
        ("lightrl.nowhere:X", "there is no module 'lightrl.nowhere'"),
        ("lightrl.data.sampler:X", "module 'lightrl.data.sampler' has no 'X'"),
    ],
)
def test_errors_say_what_to_do(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load(name)
