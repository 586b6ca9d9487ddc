"""The sandbox from outside: what a program may use, what ends it, what is left of it, and where none is to be had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import CodeConfig, GRPOConfig
from lightrl.rewards import load_reward, sandbox
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.sandbox import Confinement, SandboxLimits, SandboxUnavailableError, choose_confinement, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its limits are those of Linux")


def run(confinement: Confinement, *stdins: str, source: str, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    limits = SandboxLimits(timeout_s=timeout_s, memory_mb=256, max_output_bytes=10_000)
    try:
        runs: list[dict[str, Any]] = sandbox._supervised(source, limits, confinement, stdins=stdins or [""])["runs"]
    except RuntimeError as error:
        if "could not be set up" in str(error) or "is not installed" in str(error):
            pytest.skip(f"this system does not allow {confinement}: {error}")
        raise
    return runs


def descendants(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                found |= {child} | descendants(child)
    return found


def test_a_program_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    result = run_python(
        "import os, sys\nprint(sys.stdin.read() * 2, 'SECRET_KEY' in os.environ, os.getcwd())", stdin="ab"
    )
    assert (result.exit_code, result.timed_out) == (0, False)
    assert result.stdout.startswith("abab False /")
    assert run_python("import sys; sys.exit(3)").exit_code == 3
    for program in ("print(1)\nexit()\nprint(2)", "print(1)\nif True:\n    quit(0)\nprint(2)"):
        left = run_python(program)
        assert (left.stdout, left.exit_code) == ("1\n", 0)
    assert run_python("exit(4)").exit_code == 4
    failing = run_python("print('before')\nraise KeyError('mine')")
    assert (failing.stdout, failing.exit_code) == ("before\n", 1)
    assert "KeyError: 'mine'" in failing.stderr
    assert run_python("import sys; sys.exit('a reason')").stderr.endswith("a reason\n")


def test_a_program_ends_as_python_ends_it() -> None:
    source = (
        "import atexit, io, os, sys, threading, time\nout = io.BytesIO()\n"
        "atexit.register(lambda: os.write(1, out.getvalue()))\n"
        "def main():\n    time.sleep(0.2)\n    out.write(open(0, 'rb').read()[::-1])\n"
        "threading.Thread(target=main).start()"
    )
    result = run_python(source, stdin="olleh")
    assert (result.stdout, result.exit_code) == ("hello", 0)


@pytest.mark.parametrize("confinement", sandbox.CONFINEMENTS)
class TestEachConfinement:
    def test_each_run_has_a_process_and_a_folder_of_its_own(self, confinement: Confinement) -> None:
        source = (
            "import asyncio, os, sys, threading, decimal, json, random, tempfile\n"
            "threading.Thread(target=print, args=[sys.stdin.readline().strip()]).start()\n"
            "asyncio.run(asyncio.sleep(0))\nprint(os.listdir('.') if os.getcwd() == '/tmp' else [])\n"
            "if os.getcwd() == '/tmp':\n    open('mine', 'w').write('x')\n    tempfile.TemporaryFile().write(b'x')\n"
        )
        first, second = run(confinement, "a\n", "b\n", source=source)
        assert (first["stdout"], first["exit_code"], first["stderr"]) == ("a\n[]\n", 0, "")
        assert second["stdout"] == "b\n[]\n"

    def test_what_has_no_end_or_no_bounds_is_ended(self, confinement: Confinement) -> None:
        started = time.monotonic()
        (loop,) = run(confinement, source="import os\nos.close(1); os.close(2)\nwhile True: pass", timeout_s=1)
        assert (loop["timed_out"], loop["exit_code"]) == (True, None)
        assert time.monotonic() - started < 15
        (flood,) = run(confinement, source="while True: print('x' * 1000)")
        assert (len(flood["stdout"]), flood["exit_code"]) == (10_000, None)
        (dead,) = run(confinement, source="import ctypes\nprint('so far', flush=True)\nctypes.string_at(0)")
        assert (dead["stdout"], dead["exit_code"]) == ("so far\n", -signal.SIGSEGV)

    def test_nothing_is_left(self, confinement: Confinement) -> None:
        places = ("/tmp", "/var/tmp", "/dev/shm")
        before = {place: set(os.listdir(place)) for place in places}
        processes = descendants(os.getpid())  # such as servers that other tests have started
        source = (
            "import os\nif os.getcwd() == '/tmp':\n    os.makedirs('a/b')\n    os.chmod('a', 0)\n"
            "    for _ in range(3000):\n        os.mkdir('deep')\n        os.chdir('deep')\nprint('left')"
        )
        assert [item["stdout"] for item in run(confinement, "", "", source=source)] == ["left\n"] * 2
        new = {f"{place}/{name}" for place in places for name in set(os.listdir(place)) - before[place]}
        assert [name for name in new if "sandbox" in name] == []
        assert not descendants(os.getpid()) - processes

    def test_nothing_outlives_a_run_that_was_killed(self, confinement: Confinement) -> None:
        run(confinement, source="pass")  # skips where there is none
        program = (
            "import threading\nfrom lightrl.rewards import sandbox\n"
            "limits = sandbox.SandboxLimits(timeout_s=300)\n"
            f"sandbox._supervised('while True: pass', limits, '{confinement}', stdins=[''])"
        )
        with subprocess.Popen([sys.executable, "-c", program]) as trainer:
            deadline = time.monotonic() + 60
            while not any(is_busy(pid) for pid in descendants(trainer.pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
            started = descendants(trainer.pid)
            assert started
            trainer.kill()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []


def is_busy(pid: int) -> bool:
    """Whether a process has used half a second, which only the endless program does."""
    with suppress(OSError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().split()[13:15])) > 50
    return False


def test_it_never_runs_as_root() -> None:
    result = run_python("import os\nprint(os.getuid(), os.geteuid(), os.getgid(), os.getgroups())")
    if choose_confinement() == "landlock" and os.getuid() == 0:
        pytest.skip("a Python that only root can read: its programs have root's id and none of its powers")
    assert result.stdout.split()[0] != "0"
    assert result.stdout.split()[1] != "0"


def test_bubblewrap_is_left_out_where_it_cannot_limit_the_threads_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(sandbox, "_may", lambda capabilities: True)
    assert sandbox._bubblewrap([], as_root=True)[0] == "/usr/bin/bwrap"  # it changes the user
    with pytest.raises(RuntimeError, match="whose threads the kernel does not limit"):
        sandbox._bubblewrap([], as_root=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "--unshare-user" in sandbox._bubblewrap([], as_root=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(sandbox, "_may", lambda capabilities: False)  # no other sandbox could do better
    assert "--unshare-user" in sandbox._bubblewrap([], as_root=False)


def test_a_sandbox_that_fails_is_an_error_and_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "launcher.py"
    monkeypatch.setattr(sandbox, "_INSIDE", tmp_path)
    for text, message in (
        ("import sys\nsys.exit('no such luck')", r"The sandbox failed with exit code 1: .*no such luck"),
        ("import json\nprint(json.dumps({'error': 'OSError: capset'}))", "could not be set up: OSError: capset"),
    ):
        broken.write_text(text)
        with pytest.raises(RuntimeError, match=message):
            sandbox._supervised("print(1)", SandboxLimits(), "namespaces", stdins=[""])


def test_limits_that_the_system_does_not_allow_are_an_error_and_no_result() -> None:
    program = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
        "from lightrl.rewards.sandbox import SandboxLimits, _supervised\n"
        "print(_supervised('print(1)', SandboxLimits(), 'landlock', stdins=['']))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert found.stdout == ""  # and above all no exit code, which would be taken for the program's
    assert "The sandbox could not be set up: " in found.stderr


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sandbox, "CONFINEMENTS", ())
    choose_confinement.cache_clear()
    yield
    choose_confinement.cache_clear()


def test_packages_that_programs_cannot_see_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if choose_confinement() == "landlock":
        pytest.skip("Landlock hides no folder")
    monkeypatch.setattr(sandbox, "hides_packages", lambda: True)
    choose_confinement.cache_clear()
    choose_confinement()
    choose_confinement.cache_clear()
    assert "without installed packages such as numpy" in caplog.text


def test_without_a_sandbox_the_reward_is_refused_unless_told(
    no_sandbox: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"allows no sandbox.*Install bubblewrap.*--code.unsafe True"):
        load_reward("code")
    with pytest.raises(ValueError, match="allows no sandbox"):
        RewardSet.from_config(GRPOConfig(reward=("code",)))
    RewardSet.from_config(GRPOConfig(reward=("code",), code=CodeConfig(unsafe=True))).close()
    assert "by --code.unsafe programs run all the same" in caplog.text
    result = run_python("import os\nprint(os.path.exists('/proc/self'))", unsafe=True)
    assert (result.stdout, result.exit_code) == ("True\n", 0)
    assert sandbox.run_tests("def f(): return 4", ["assert f() == 4", "assert f() == 5"], unsafe=True) == [True, False]


def test_the_option_needs_the_reward() -> None:
    with pytest.raises(ValueError, match="--code.unsafe is given, but code is not among --reward"):
        RewardSet.from_config(GRPOConfig(code=CodeConfig(unsafe=True)))
