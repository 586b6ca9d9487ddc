"""Checkpoints of earlier versions are read, and the training continues with the numbers that it had then."""

import json
from pathlib import Path
from typing import Any

import old_checkpoint_program
import pytest

from lightrl.testing import run_spmd

STORED = Path(__file__).parent / "fixtures"  # written at version 0.1 by tests/programs/old_checkpoint_program.py


def check(result: dict[str, Any], name: str) -> None:
    expected = json.loads((STORED / name / "expected.json").read_text())
    for numbers, wanted in zip(result["numbers"], expected["numbers"], strict=True):
        assert numbers == pytest.approx(wanted, rel=1e-6)  # bit for bit on the machine that wrote them
    assert result["average"] == pytest.approx(expected["average"], rel=1e-6)
    assert result["global_step"] == expected["global_step"]


@pytest.mark.parametrize("name", ["single", "fsdp"])  # written by one process; by two ranks, each its rows
def test_one_process_continues_what_an_earlier_version_wrote(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    old_checkpoint_program.read("single", STORED / name)
    check(json.loads(capsys.readouterr().out.splitlines()[-1]), name)


@pytest.mark.slow
def test_two_ranks_continue_what_an_earlier_version_wrote() -> None:
    program = str(old_checkpoint_program.__file__)
    output = run_spmd(program, str(STORED / "fsdp"), "fsdp", world_size=2, timeout_s=200)
    (line,) = (line for line in output.splitlines() if '"numbers"' in line)
    check(json.loads(line[line.index("{") :]), "fsdp")
