"""The ways out of the sandbox, as this user and as an ordinary one, in each confinement that the system allows."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_escapes import ALL

import lightrl
from lightrl.rewards import sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

REPOSITORY = Path(lightrl.__file__).parents[1]
ESCAPES = Path(__file__).parents[2] / "programs" / "sandbox_escapes.py"
NOBODY = 65534


@pytest.fixture
def host() -> Iterator[dict[str, Any]]:
    """What an escape would find, with rights as loose as they can be."""
    libc = ctypes.CDLL(None)
    with (
        tempfile.TemporaryDirectory(prefix="lightrl-test-host-") as name,
        subprocess.Popen(["sleep", "600"]) as victim,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        folder = Path(name)
        folder.chmod(0o777)
        for file, rights in (("secret", 0o600), ("data", 0o666)):
            (folder / file).write_text("expected-4711")
            (folder / file).chmod(rights)
        named.bind(f"{folder}/socket")
        named.listen()
        abstract.bind(f"\0{folder}")
        abstract.listen()
        segment = libc.shmget(0, 4096, 0o1666)
        yield {
            "folder": name,
            "secret": f"{folder}/secret",
            "data": f"{folder}/data",
            "socket": f"{folder}/socket",
            "abstract": name,
            "temporary": tempfile.gettempdir(),
            "victim": victim.pid,
            "port": server.getsockname()[1],
            "segment": segment,
            "repository": str(REPOSITORY),
            "inside": str(sandbox._INSIDE),
        }
        libc.shmctl(segment, 0, None)
        assert victim.poll() is None
        assert (folder / "data").read_text() == "expected-4711"
        assert sorted(path.name for path in folder.iterdir()) == ["data", "secret", "socket"]
        assert folder.stat().st_mode & 0o777 == 0o777
        for listener in (server, named, abstract):
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):  # nobody has come
                listener.accept()
        victim.kill()


def worked(host: dict[str, Any], *python: str, **user: Any) -> dict[str, Any]:
    """Runs all escapes in each confinement, in a Python of the given user; returns those that worked."""
    shared = set(os.listdir("/dev/shm"))
    found = subprocess.run(
        [*python, "-I", str(ESCAPES), json.dumps(host)],
        capture_output=True,
        text=True,
        timeout=200,
        env={"SECRET_KEY": "x", "PATH": os.defpath},
        check=False,
        **user,
    )
    assert found.returncode == 0, found.stderr
    assert set(os.listdir("/dev/shm")) <= shared
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def check(found: dict[str, Any]) -> None:
    available = {name: result for name, result in found.items() if not str(result).startswith("refused")}
    assert available, found  # the tests need a sandbox of some kind
    assert available == {name: [] for name in available}


def test_no_way_leads_out_for_this_user(host: dict[str, Any]) -> None:
    assert len(ALL) > 120
    check(worked(host, sys.executable))


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="it is for root, with setpriv")
def test_no_way_leads_out_for_the_root_of_a_container(host: dict[str, Any]) -> None:
    check(worked(host, "setpriv", "--bounding-set=-sys_admin", sys.executable))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_no_way_leads_out_for_an_ordinary_user(host: dict[str, Any]) -> None:
    python = next((path for path in ("/usr/bin/python3", sys.executable) if is_usable(path)), None)
    if python is None or not is_readable(ESCAPES):
        pytest.skip("no Python and no repository that an ordinary user can read")
    for name in ("secret", "data"):
        shutil.chown(host[name], NOBODY)
    check(worked(host, python, user=NOBODY, group=NOBODY, extra_groups=[]))


def is_usable(python: str) -> bool:
    command = [python, "-c", "import sys; assert sys.version_info >= (3, 10)"]
    try:
        return subprocess.run(command, user=NOBODY, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def is_readable(path: Path) -> bool:
    return subprocess.run(["cat", str(path)], user=NOBODY, capture_output=True, check=False).returncode == 0
