"""Each limit of a machine, as found and with too little of it."""

import os
import resource
import shutil
import socket
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from lightrl.doctor import machine
from lightrl.doctor.findings import Finding
from lightrl.doctor.machine import check_devices, check_folders, check_limits, check_ports
from lightrl.rewards.sandbox import SandboxUnavailableError

Usage = namedtuple("Usage", "total used free")


def by_check(findings: object) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_more_threads_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert by_check(check_devices())["threads"].verdict == "ok"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = by_check(check_devices())["threads"]
    assert (found.verdict, found.found) == ("warning", "8 threads of 2 rank(s) on 4 cores")
    assert "OMP_NUM_THREADS=2" in found.remedy
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert "OMP_NUM_THREADS=1:" in by_check(check_devices())["threads"].remedy


def test_gpus_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two GPUs that do not reach each other, one of them in use, for four ranks."""
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda index: "H100",
        "mem_get_info": lambda index: ((80 - 20 * index) << 30, 80 << 30),
        "can_device_access_peer": lambda one, two: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = by_check(check_devices())
    assert found["devices"] == Finding("devices", "fail", "2 x H100, NCCL 2.27.3", found["devices"].remedy)
    assert found["devices"].remedy.startswith("Start at most 2 ranks here")
    assert [found[f"memory of GPU {index}"].verdict for index in (0, 1)] == ["ok", "warning"]
    assert found["peer access"].found == "0 of 1 pairs of GPUs reach each other directly"
    assert found["peer access"].verdict == "warning"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: True)
    found = by_check(check_devices())
    assert (found["devices"].verdict, found["peer access"].verdict) == ("ok", "ok")


def test_limits_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 32 << 20, 32 << 20))
    found = by_check(check_limits())
    assert (found["open files"].verdict, found["open files"].found) == ("warning", "1024")
    assert found["shared memory"].verdict == "fail"
    assert "--shm-size" in found["shared memory"].remedy
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 30, 64 << 30, 512 << 20))  # nearly full
    found = by_check(check_limits())
    assert (found["open files"].verdict, found["shared memory"].verdict) == ("ok", "warning")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert by_check(check_limits())["open files"] == Finding("open files", "ok", "unlimited")


def test_a_host_name_without_an_address_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_check(check_ports())["loopback"].verdict == "ok"

    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert by_check(check_ports())["host name"].verdict == "warning"


def test_a_host_name_that_nothing_answers_for_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.doctor.machine._LOOK_UP_S", 0.1)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: time.sleep(2) or "10.0.0.1")
    found = by_check(check_ports())["host name"]
    assert (found.verdict, "no answer within 0.1 s" in found.found) == ("warning", True)


def test_a_loopback_address_is_a_warning_where_other_machines_must_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    for world, verdict in (("2", "ok"), ("4", "warning")):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert by_check(check_ports())["host name"].verdict == verdict


def test_a_folder_that_this_user_may_not_enter(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    user = os.geteuid()
    try:
        os.seteuid(user or 65534)  # root may enter every folder
        output, *others = check_folders(str(tmp_path / "closed" / "run"))
    finally:
        os.seteuid(user)
    assert (output.verdict, output.remedy) == ("fail", "Give a folder that can be written by --output_dir.")
    assert len(others) == 3


def test_folders_that_a_run_writes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    found = by_check(check_folders(str(tmp_path / "file" / "run")))
    assert found["output folder"].verdict == "fail"
    assert found["output folder"].remedy == "Give a folder that can be written by --output_dir."
    assert found["cache of built-in models"].verdict == "ok"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]  # nothing is left, and no folder was made
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 1 << 30))
    assert by_check(check_folders(str(tmp_path)))["output folder"].verdict == "warning"


def test_caches_are_where_their_variables_say_or_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "")
    monkeypatch.setenv("LIGHTRL_CACHE", "~/own")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 1 << 30))
    found = by_check(check_folders(str(tmp_path)))
    for name, folder, setting in (
        ("cache of Hugging Face", tmp_path / ".cache/huggingface", "HF_HOME"),
        ("cache of built-in models", tmp_path / "own", "LIGHTRL_CACHE"),
    ):
        assert found[name].found.startswith(f"{folder}, ")
        assert found[name].remedy.endswith(f"by {setting}.")
    assert machine.nearest_folder(tmp_path) == machine.nearest_folder(tmp_path / "a" / "b") == tmp_path


def refuse() -> str:
    raise SandboxUnavailableError("This system allows no sandbox. Install bubblewrap.")


@pytest.mark.parametrize(
    ("confinement", "is_hidden", "verdict"),
    [("bubblewrap", False, "ok"), ("bubblewrap", True, "warning"), ("landlock", True, "ok")],
)
def test_the_confinement(confinement: str, is_hidden: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "choose_confinement", lambda: confinement)
    monkeypatch.setattr(machine, "hides_packages", lambda: is_hidden)
    (found,) = machine.check_sandbox()
    assert (found.verdict, found.found) == (verdict, f"--reward code runs programs by {confinement}")


def test_no_sandbox_is_a_warning_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "choose_confinement", refuse)
    (found,) = machine.check_sandbox()
    assert (found.verdict, found.remedy) == ("warning", "This system allows no sandbox. Install bubblewrap.")
