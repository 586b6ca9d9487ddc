"""scripts/torchvision_cpu: torchvision can be imported, and setup edited nothing of it."""

from __future__ import annotations

import _ctypes
import base64
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from lightrl.testing import run_program

PACKAGE = Path(__file__).resolve().parents[1] / "scripts" / "torchvision_cpu"
CALL = "import lightrl_torchvision_cpu as package, torch\npackage.declare_operators()\npackage.declare_operators()\n"
OPERATORS = "print(torch.ops.torchvision.nms, torch.ops.torchvision.qnms)"


def run_beside(torchvision: Path, code: str) -> str:
    """Runs code in a fresh process that finds this torchvision and the package, but no entry point of torch."""
    env = {"PYTHONPATH": f"{torchvision}{os.pathsep}{PACKAGE}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return run_program([sys.executable, "-c", code], timeout_s=120, env=env).strip()


@pytest.mark.parametrize("library", [None, "_C.so", "_C_stable.so"])
def test_operators_are_declared_where_no_library_loads(tmp_path: Path, library: str | None) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    if library:
        (tmp_path / "torchvision" / library).write_text("not a library")
    assert run_beside(tmp_path, CALL + OPERATORS) == "torchvision.nms torchvision.qnms"


@pytest.mark.parametrize("library", ["_C.so", "_C_stable.so"])
def test_a_library_that_loads_declares_its_operators_itself(tmp_path: Path, library: str) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    shutil.copy(_ctypes.__file__, tmp_path / "torchvision" / library)
    assert run_beside(tmp_path, CALL + "print(hasattr(torch.ops.torchvision, 'nms'))") == "False"


def test_the_entry_point_names_the_function() -> None:
    metadata = (PACKAGE / "pyproject.toml").read_text()
    assert re.search(
        r'\[project\.entry-points\."torch\.backends"\]\n\w+ = "lightrl_torchvision_cpu:declare_operators"', metadata
    )


def test_the_installed_torchvision_is_unedited_and_can_be_imported() -> None:
    try:
        files = importlib.metadata.files("torchvision") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchvision is not installed")
    sources = [file for file in files if file.suffix == ".py" and file.hash]
    assert sources
    assert [str(file) for file in sources if sha256(Path(str(file.locate()))) != file.hash.value] == []
    run_program([sys.executable, "-c", "import torchvision; from transformers import AutoProcessor"], timeout_s=120)


def sha256(path: Path) -> str:
    """Returns a file's digest as a wheel's RECORD spells it."""
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
