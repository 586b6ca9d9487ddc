"""torchrun's report, which comes last, ends with the error of the rank that failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lightrl.last_error import leave_error
from lightrl.testing import free_port

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_grpo.py"


def test_torchrun_reads_the_first_error_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    leave_error("error: the cause\nand more")
    leave_error("what followed")
    assert [item.name for item in tmp_path.iterdir()] == ["error.json"]
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    assert failure.message == "error: the cause\nand more"
    assert failure.timestamp == int(json.loads(path.read_text())["timestamp"]) > 1.7e9


def test_nothing_is_written_where_nobody_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    leave_error("error")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    leave_error("error")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--num_promts", "3"], "The options are wrong: the first lines of the output say which"),
        (["--group_size", "1"], "error: --group_size is 1: grpo compares the samples of a prompt with each other"),
    ],
    ids=["an option that the parser refuses", "one that a check refuses"],
)
def test_the_report_of_torchrun_ends_with_the_error(flags: list[str], cause: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    torchrun += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), *flags, "--output_dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert cause in done.stderr.partition("Root Cause")[2].partition("traceback : ")[2]
