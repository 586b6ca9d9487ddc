"""What the ranks find together, by hand and on two real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.doctor.ranks import _equal, _own_devices

ROOT = Path(__file__).parents[2]


def test_versions_that_differ_fail_and_settings_warn() -> None:
    facts = [{"torch": "2.13", "numpy": "2"}, {"torch": "2.12", "numpy": "2"}]
    found = _equal("equal versions", facts, "Do.")
    assert (found.verdict, found.found) == ("fail", "torch is 2.13 (rank 0), 2.12 (rank 1)")
    found = _equal("equal settings", [{"NCCL_DEBUG": "INFO"}, {}], "Do.")
    assert (found.verdict, found.found) == ("warning", "NCCL_DEBUG is INFO (rank 0), not set (rank 1)")
    assert _equal("equal settings", [{}, {}], "Do.").verdict == "ok"


def test_two_ranks_on_one_gpu_fail() -> None:
    assert _own_devices([("a", "1"), ("b", "1"), ("a", ""), ("a", "")]).verdict == "ok"
    found = _own_devices([("a", "1"), ("a", "1"), ("b", "1")])
    assert (found.verdict, found.found) == ("fail", "shared: a 1")


@pytest.mark.slow
def test_two_ranks_check_together_and_one_prints(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += ["-m", "lightrl.doctor", "--json", "True", "--output_dir", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    here, together = json.loads(done.stdout)
    assert together["where"] == "all 2 ranks together"
    assert {finding["check"] for finding in here["findings"]} >= {"Python", "versions", "output folder", "sandbox"}
    verdicts = {finding["check"]: finding["verdict"] for finding in together["findings"]}
    wanted = ("all-reduce on cpu", "clocks", "equal versions", "equal settings", "a device for each rank")
    assert verdicts == dict.fromkeys(wanted, "ok")
