"""Hostile programs, with namespaces and (where a system allows none) without."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lightrl.rewards import sandbox
from lightrl.rewards.sandbox import SandboxLimits, SandboxResult, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its limits are those of Linux")


def run(source: str, stdin: str = "", *, use_namespaces: bool = True, timeout_s: float = 10.0) -> SandboxResult:
    limits = SandboxLimits(timeout_s=timeout_s, memory_mb=256, use_namespaces=use_namespaces, max_output_bytes=10_000)
    return run_python(source, stdin=stdin, limits=limits)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sandboxes of a test have their folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def running_in(folder: Path) -> list[str]:
    """Processes whose working directory is under the folder, or was."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            where = os.readlink(process / "cwd")
            found += [where] if where.startswith(str(folder)) else []
    return found


def test_a_program_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    result = run("import os, sys\nprint(sys.stdin.read() * 2, 'SECRET_KEY' in os.environ, os.listdir())", "ab")
    assert (result.stdout, result.exit_code, result.timed_out) == ("abab False []\n", 0, False)
    assert run("import sys; sys.exit(3)").exit_code == 3
    failing = run("print('before')\nraise KeyError('mine')")
    assert (failing.stdout, failing.exit_code) == ("before\n", 1)
    assert "KeyError: 'mine'" in failing.stderr


@pytest.mark.parametrize("use_namespaces", [True, False])
class TestHostile:
    def test_a_loop_ends_at_the_time_limit(self, use_namespaces: bool) -> None:
        started = time.monotonic()
        result = run("while True: pass", use_namespaces=use_namespaces, timeout_s=1)
        assert result.timed_out
        assert result.exit_code is None
        assert time.monotonic() - started < 15

    def test_a_fork_bomb_is_bounded_and_leaves_nothing(self, use_namespaces: bool, temporary: Path) -> None:
        bomb = "import os, sys, time\ncount = 0\ntry:\n    while True:\n        count += os.fork() != 0\n"
        bomb += "except OSError as error:\n    print('refused', flush=True)\ntime.sleep(600)"
        result = run(bomb, use_namespaces=use_namespaces, timeout_s=2)
        assert result.timed_out
        assert "refused" in result.stdout
        assert result.stdout.count("refused") <= 16
        assert not running_in(temporary)

    def test_what_a_program_leaves_behind_is_killed(self, use_namespaces: bool, temporary: Path) -> None:
        orphan = (
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
        )
        orphan += "    os._exit(0)\nprint('bye')"
        result = run(orphan, use_namespaces=use_namespaces)
        assert (result.stdout, result.exit_code) == ("bye\n", 0)
        assert not running_in(temporary)

    def test_memory_files_and_output_are_bounded(self, use_namespaces: bool) -> None:
        assert "MemoryError" in run("bytearray(1 << 30)", use_namespaces=use_namespaces).stderr
        assert "File too large" in run("open('f', 'wb').write(b'x' * (64 << 20))", use_namespaces=use_namespaces).stderr
        flood = run("while True: print('x' * 1000)", use_namespaces=use_namespaces)
        assert len(flood.stdout) == 10_000
        assert flood.exit_code is None

    def test_the_network_cannot_be_reached(self, use_namespaces: bool) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.5)
            port = server.getsockname()[1]
            program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)"
            result = run(program, use_namespaces=use_namespaces)
            assert result.exit_code == 1
            assert "unreachable" in result.stderr or "no network" in result.stderr or "refused" in result.stderr
            with pytest.raises(TimeoutError):
                server.accept()

    def test_other_processes_are_not_killed(self, use_namespaces: bool) -> None:
        with subprocess.Popen(["sleep", "60"]) as other:
            run(f"import os\nos.kill({other.pid}, 9)", use_namespaces=use_namespaces)
            assert other.poll() is None
            other.kill()


def test_nothing_is_left_in_the_temporary_folder(temporary: Path) -> None:
    result = run("import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nprint(os.getcwd())")
    assert result.stdout.startswith(f"{temporary}/lightrl-sandbox-")
    assert list(temporary.iterdir()) == []


def test_a_sandbox_that_fails_is_an_error_and_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "launcher.py"
    broken.write_text("import sys\nsys.exit('no such luck')")
    monkeypatch.setattr(sandbox, "_LAUNCHER", broken)
    with pytest.raises(RuntimeError, match=r"The sandbox failed with exit code 1: .*no such luck"):
        run("print(1)")
    broken.write_text("import json\nprint(json.dumps({'error': 'OSError: capset'}))")
    with pytest.raises(RuntimeError, match="could not be set up: OSError: capset"):
        run("print(1)")


def test_limits_that_the_system_does_not_allow_are_an_error_and_no_result() -> None:
    program = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
    program += "from lightrl.rewards.sandbox import run_python\nprint(run_python('print(1)'))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert found.stdout == ""  # and above all no exit code, which would be taken for the program's
    assert "The sandbox could not be set up: " in found.stderr
    assert "not allowed to raise maximum limit" in found.stderr


def test_a_program_cannot_put_a_pipe_in_the_place_of_its_errors() -> None:
    swap = "import os\ntry:\n    os.remove('../stderr')\n    os.mkfifo('../stderr')\nexcept PermissionError:\n    pass"
    result = run(f"import sys\nprint('mine', file=sys.stderr)\n{swap}")
    assert (result.exit_code, result.stderr) == (0, "mine\n")


def test_it_never_runs_as_root() -> None:
    result = run("import os\nprint(os.getuid())", use_namespaces=False)
    assert int(result.stdout) == os.getuid() or os.getuid() == 0
    assert int(result.stdout) != 0
