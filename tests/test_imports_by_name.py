import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

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
        ("sampler2.py", "Unknown thing 'sampler2.py'"),
        ("mine.py:", "Unknown thing 'mine.py:'"),
        ("sampler2", "Unknown thing 'sampler2'. Did you mean sampler\\?.*package.module:MyThing"),
        (".mine:X", "Unknown thing '.mine:X'..*package.module:MyThing or path/to/file.py:MyThing"),
        ("lightrl.nowhere:X", "there is no module 'lightrl.nowhere'"),
        ("lightrl.data.sampler:X", "lightrl.data.sampler has no 'X'"),
        ("lightrl:GRPOTraine", "lightrl has no 'GRPOTraine'. Did you mean GRPOTrainer"),
    ],
)
def test_errors_say_what_to_do(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load(name)


def test_an_object_is_loaded_from_a_file_by_any_path_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text("class Thing: ...\ndef make(): ...\n")
    monkeypatch.chdir(tmp_path)
    thing = load("sub/mine.py:Thing")
    assert thing is load("./sub/mine.py:Thing") is load(f"{tmp_path}/sub/mine.py:Thing")
    with pytest.raises(ValueError, match=r"sub/mine.py has no 'Thign'. Did you mean Thing\?$"):
        load("sub/mine.py:Thign")
    with pytest.raises(
        ValueError, match=r"names a file, but no function or class of it. Write sub/mine.py:Thing or sub/mine.py:make.$"
    ):
        load("sub/mine.py")
    with pytest.raises(FileNotFoundError, match=f"no file mine.py. The working directory is {tmp_path}."):
        load("mine.py:Thing")


def test_a_file_without_an_attribute_is_told_with_what_it_defines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sample").write_text("")  # no Python file
    Path("mine.py").write_text("async def play(): ...\ndef _own(): ...\nVALUE = 3\n")
    Path("nothing.py").write_text("from pathlib import Path\n")
    Path("broken.py").write_text("def f(s) return 1\n")
    told = {
        "sample": "Unknown thing 'sample'. Did you mean sampler?",
        "mine.py": "names a file, but no function or class of it. Write mine.py:play.",
        "nothing.py": "Write nothing.py:MyThing.",
        "broken.py": "Write broken.py:MyThing.",
    }
    for name, text in told.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            load(name)
    with pytest.raises(ValueError, match=r"nothing.py has no 'Pathh'.$"):  # what it imports is no hint
        load("nothing.py:Pathh")


def test_a_module_that_changes_settings_of_torch_is_told_without_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "changing_module.py").write_text("import torch\ntorch.set_grad_enabled(False)\n")
    try:
        for name in ("changing_module:X", f"{tmp_path}/changing_module.py:X"):
            with pytest.raises(ImportError, match="^The import of .*changing_module.* from True to False"):
                load(name)
            torch.set_grad_enabled(True)
    finally:
        torch.set_grad_enabled(True)


def test_a_file_may_import_what_is_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_run.py").write_text("VALUE = 3\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "importing.py").write_text("from beside_the_run import VALUE\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load("sub/importing.py:VALUE") == 3


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "import no_such_package_here\n",
            "ModuleNotFoundError at line 2 of .*: No module named 'no_such_package_here'",
        ),
        ("def f(s) return 1\n", "SyntaxError at line 2 of .*: expected ':'"),
        ("open('no_such_table.json')\n", "FileNotFoundError at line 2 of .*no_such_table.json"),
        ("int('x')\n", "ValueError at line 2 of .*failing_module.py: invalid literal for int"),
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
