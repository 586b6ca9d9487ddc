"""The table, the JSON and the exit code of `lightrl doctor`."""

import json

import pytest
import torch

from lightrl.comm import Comm
from lightrl.doctor import report
from lightrl.doctor.findings import Finding, ok

FINDINGS = [ok("one", "fine"), Finding("two", "warning", "slow", "Wait."), Finding("three", "fail", "no", "Do.")]
FOUND = [("host", FINDINGS)]


def test_the_table() -> None:
    assert report._as_table(FOUND).splitlines() == [
        "host:",
        "  ok   one: fine",
        "  WARN two: slow",
        "       -> Wait.",
        "  FAIL three: no",
        "       -> Do.",
        "3 checks: 1 failed, 1 warned",
    ]
    assert json.loads(report._as_json(FOUND))[0]["findings"][1]["verdict"] == "warning"


@pytest.mark.parametrize(("number", "code"), [(2, 0), (3, 1)])
def test_a_warning_passes_and_a_failure_does_not(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "_collect", lambda comm, config: [("host", FINDINGS[:number])])
    monkeypatch.setattr(report, "connect", lambda device, timeout: Comm(device=device, timeout=timeout))
    assert report.main([]) == code
    assert f"{number} checks" in capsys.readouterr().out


def test_ranks_that_do_not_meet_get_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(device: object, timeout: object) -> Comm:
        raise RuntimeError("connection timed out")

    monkeypatch.setattr(report, "connect", unreachable)
    assert report.main([]) == 1
    assert "Is MASTER_ADDR the address of the first machine" in capsys.readouterr().err


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as end:
        report.main([])
    assert end.value.code == 2
    assert "error: Local rank 1 has no GPU: 1 usable here." in capsys.readouterr().err
