"""The notebooks of examples/ run from their first cell to their last, and are written as Jupyter reads them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.testing import run_program

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def cells_of(notebook: Path) -> list[Any]:
    content = json.loads(notebook.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    cells: list[Any] = content["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    return cells


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    code = [cell for cell in cells_of(notebook) if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code)
    program = tmp_path / f"{notebook.stem}.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in code))
    run_program([sys.executable, str(program)], timeout_s=200, cwd=tmp_path)
    if (metrics := tmp_path / "run" / "metrics.jsonl").exists():
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert rows[0]["eval/accuracy"] < 0.4
        assert rows[-1]["eval/accuracy"] > 0.7


def test_there_are_two() -> None:
    assert len(NOTEBOOKS) == 2
