from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrl.config import JudgeConfig
from lightrl.rewards import BUILTIN_REWARDS, load_reward

OWN_REWARD = """
from dataclasses import dataclass

@dataclass
class Scale:
    factor: float = 2.0

def length_reward(sample):
    return Scale().factor * len(sample)

TABLE = {}
"""


_NEEDED: dict[str, dict[str, Any]] = {
    "length": {"target": 10},
    "judge": {"settings": JudgeConfig(url="http://127.0.0.1:9", model="m")},
}


@pytest.mark.parametrize("name", sorted(set(BUILTIN_REWARDS) - {"reward_model"}))  # that needs a model
def test_each_builtin_loads_by_its_name(name: str) -> None:
    assert callable(load_reward(name, _NEEDED.get(name)))


def test_a_misspelt_name_gives_the_nearest_and_all() -> None:
    with pytest.raises(
        ValueError,
        match="Unknown reward 'exct_match'. Did you mean exact_match.* Choose one of exact_match, contains, "
        "last_number, .*, or give your own as package.module:my_reward or path/to/file.py:my_reward.",
    ):
        load_reward("exct_match")


@pytest.mark.parametrize("name", ["", ":", "json:", ":function", "own.py"])
def test_half_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Unknown reward"):
        load_reward(name)


def test_a_reward_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN_REWARD)
    reward = load_reward(f"{tmp_path / 'own.py'}:length_reward")
    assert reward("abc") == 6.0  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    assert load_reward("own.py:length_reward")("abc") == 6.0  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"own.py has no 'lenght_reward'. Did you mean length_reward\?"):
        load_reward("own.py:lenght_reward")


def test_a_reward_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "own_module.py").write_text(OWN_REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_reward("own_package.own_module:length_reward")("abc") == 6.0  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="own_package.own_module has no 'lenght_reward'. Did you mean length_reward"):
        load_reward("own_package.own_module:lenght_reward")
    with pytest.raises(ValueError, match="is a dict: it must be a function from a Sample to a number"):
        load_reward("own_package.own_module:TABLE")
    with pytest.raises(ValueError, match="The reward .* there is no module 'own_package.absent'"):
        load_reward("own_package.absent:f")


def test_a_missing_module_or_file_is_named() -> None:
    with pytest.raises(ValueError, match="The reward .* there is no module 'absent_package'"):
        load_reward("absent_package.module:f")
    with pytest.raises(FileNotFoundError, match=r"no file absent.py. The working directory is /"):
        load_reward("absent.py:f")


def test_a_file_that_fails_while_it_is_loaded_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    for code, told in (("import absent_dependency", "ModuleNotFoundError"), ("exit(0)", "SystemExit")):
        path.write_text(f"\n{code}\n")
        with pytest.raises(ImportError, match=f"The reward '{path}:f' cannot be loaded: {told} at line 2 of {path}: "):
            load_reward(f"{path}:f")


def test_a_module_that_fails_while_it_is_loaded_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_broken_module.py").write_text("import absent_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="at line 1 of .*own_broken_module.py: No module named 'absent_dependency'"):
        load_reward("own_broken_module:f")


def test_parameters_are_checked_and_read_as_declared(tmp_path: Path) -> None:
    path = tmp_path / "with_parameters.py"
    path.write_text(
        "def scaled(sample, *, by: float = 2.0, pattern: str = '', flag: bool = False):\n"
        "    return by, pattern, flag\n"
        "def needing(sample, *, by: int):\n"
        "    return by\n"
        "class Built:\n"
        "    def __init__(self, *, by: int = 1):\n"
        "        self.by = by\n"
        "    def __call__(self, sample):\n"
        "        return self.by\n"
        "class Positional(Built):\n"
        "    def __init__(self, by):\n"
        "        self.by = by\n"
    )
    given = {"by": "3e-1", "pattern": "[a-z]: 1", "flag": "true"}
    assert load_reward(f"{path}:scaled", given)(None) == (0.3, "[a-z]: 1", True)  # type: ignore[arg-type, comparison-overlap]
    assert load_reward(f"{path}:Built", {"by": "4"})(None) == 4  # type: ignore[arg-type]
    assert load_reward(f"{path}:Positional", {"by": "4"})(None) == 4  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"needs a value for by: give --reward_args Positional.by="):
        load_reward(f"{path}:Positional")
    with pytest.raises(ValueError, match="has no parameter 'bye'. It has by, pattern, flag."):
        load_reward(f"{path}:scaled", {"bye": "1"})
    with pytest.raises(ValueError, match="by is 'x', and it must be float"):
        load_reward(f"{path}:scaled", {"by": "x"})
    with pytest.raises(ValueError, match="by is 'true', and it must be int"):
        load_reward(f"{path}:needing", {"by": "true"})
    with pytest.raises(ValueError, match=r"needs a value for by: give --reward_args needing.by="):
        load_reward(f"{path}:needing")
    with pytest.raises(ValueError, match="'exact_match' has no parameter 'x'. It has none."):
        load_reward("exact_match", {"x": "1"})
