"""What the ranks find together, by hand and on two real ones."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightrl.doctor.ranks import _appears, _equal, _own_devices, _shared_folder

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


@pytest.mark.parametrize("delay_s", [0.0, 0.3, None])  # None: it never comes
def test_a_folder_that_a_rank_does_not_see_warns(
    delay_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightrl.doctor.ranks._SEEN_S", 0.8)
    written = tmp_path / "written"
    if delay_s == 0:
        written.touch()
    elif delay_s:
        threading.Timer(delay_s, written.touch).start()
    assert _appears(written) is (delay_s is not None)
    ranks = [[str(written)], [True, delay_s is not None]]
    comm = SimpleNamespace(is_main=False, all_gather_object=lambda _: ranks.pop(0))
    found = _shared_folder(comm, tmp_path)
    assert found.verdict == ("warning" if delay_s is None else "ok")
    assert ("is not seen by ranks [1]" in found.found) is (delay_s is None)


def test_a_folder_that_rank_0_cannot_write_is_not_looked_for(tmp_path: Path) -> None:
    comm = SimpleNamespace(is_main=True, all_gather_object=lambda item: [item, ""])
    found = _shared_folder(comm, tmp_path / "absent")
    assert (found.verdict, found.found) == ("warning", f"rank 0 cannot write in {tmp_path}/absent")


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
    wanted += ("shared output folder",)
    assert verdicts == dict.fromkeys(wanted, "ok")
    assert list(tmp_path.iterdir()) == []
