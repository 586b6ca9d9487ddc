import importlib
import re
from pathlib import Path

import pytest

from lightrl.imports import is_installed, line_of_own_code, load_object
from lightrl.rewards.reward_set import load_reward

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
        ("./mine.py:X", "Unknown thing './mine.py:X'..*package.module:MyThing"),
        ("lightrl.nowhere:X", "there is no module 'lightrl.nowhere'"),
        ("lightrl.data.sampler:X", "module 'lightrl.data.sampler' has no 'X'"),
    ],
)
def test_errors_say_what_to_do(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load(name)


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("own_file.py", " Name it as Python imports it: own_file."),
        ("sub/own_file.py", r".*: sub\.own_file\."),
        ("gone.py", ""),
    ],
)
def test_a_file_is_named_as_it_can_be_imported(
    file: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sub").mkdir()
    for path in ("own_file.py", "sub/own_file.py"):
        (tmp_path / path).write_text("X = 1")
    with pytest.raises(ValueError, match=rf"there is no module .*started in \({tmp_path}\)\.{remedy}$"):
        load(f"{file}:X")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "import no_such_package_here\n",
            "ModuleNotFoundError at line 2 of .*: No module named 'no_such_package_here'",
        ),
        ("def f(s) return 1\n", "SyntaxError at line 2 of .*: expected ':'"),
        ("open('no_such_table.json')\n", "FileNotFoundError at line 2 of .*no_such_table.json"),
        ("raise SystemExit(0)\n", "SystemExit at line 2 of .*: 0. Correct that line"),
    ],
)
def test_code_that_fails_while_it_is_loaded_is_named_with_its_line(
    code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing_module.py").write_text(f"\n{code}")
    with pytest.raises(ImportError, match=f"The thing 'failing_module:X' cannot be loaded: {told}"):
        load("failing_module:X")


def test_an_error_of_a_users_code_is_located_and_one_of_lightrl_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_calls.py").write_text(
        "import json\nfrom lightrl.config import GRPOConfig\n"
        "def parse():\n    json.loads('{')\n"
        "def wrap():\n    try:\n        parse()\n"
        "    except ValueError as error:\n        raise OSError('x') from error\n"
        "def configure():\n    GRPOConfig(max_steps=-1)\n"
    )
    for name, line in (("parse", 4), ("wrap", 9)):  # in json's code, on behalf of the user's
        with pytest.raises((ValueError, OSError)) as caught:
            getattr(importlib.import_module("own_calls"), name)()
        where = rf" \((JSONDecode|OS)Error at line {line} of {tmp_path}/own_calls.py, in {name}\)"
        assert re.fullmatch(where, line_of_own_code(caught.value))
    with pytest.raises(ValueError, match="max_steps") as caught:
        importlib.import_module("own_calls").configure()
    assert line_of_own_code(caught.value) == ""
    assert line_of_own_code(ValueError("never raised")) == ""


def test_a_file_beside_the_users_is_told_with_the_path_to_set(tmp_path: Path) -> None:
    (tmp_path / "my_helper.py").write_text("")
    (tmp_path / "my_rewards.py").write_text("import my_helper\n")
    told = f"No module named 'my_helper'. my_helper is in the same folder: start the run with PYTHONPATH={tmp_path}."
    with pytest.raises(ImportError, match=re.escape(told)):
        load_reward(f"{tmp_path}/my_rewards.py:f")
