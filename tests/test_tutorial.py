"""Walks through docs/tutorial.md: saves the files that it has the reader save, and runs its commands in their order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lightrl.testing import free_port

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(
    r"Save this as `(?P<file>[\w.]+)`|^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
NEEDS_MORE = ("quickstart.sh", "source .venv", "Qwen/")  # its own test, a shell of the reader's, a GPU and a download


class Step(NamedTuple):
    """What the reader does with a block."""

    file: str  # to save it as; empty: it is run
    code: str


def steps() -> Iterator[Step]:
    file = ""
    for part in PART.finditer((ROOT / "docs" / "tutorial.md").read_text()):
        if part["file"]:
            file = part["file"]
        elif part["language"] == "python" or not any(text in part["code"] for text in NEEDS_MORE):
            assert bool(file) == (part["language"] == "python"), part["code"]
            yield Step(file, part["code"])
            file = ""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_reader_can_do_all_of_it(tmp_path: Path) -> None:
    for name in ("scripts", "configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": search, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = []
    for step in steps():
        if step.file:
            (tmp_path / step.file).write_text(step.code)
            continue
        code = step.code.replace("MASTER_PORT=29511", f"MASTER_PORT={free_port()}")  # that one may be taken here
        found = subprocess.run(
            ["bash", "-e", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
        )
        assert not found.returncode, f"{step.code}\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
        done.append(step.code)
    assert len(done) == 7, done
    runs = [path for path in (tmp_path / "runs").iterdir() if (path / "metrics.jsonl").is_file()]
    assert len(runs) >= 7
    for run in runs:
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] in (10, 20, 40)
    assert (tmp_path / "runs" / "groups-of-16" / "report.html").is_file()
