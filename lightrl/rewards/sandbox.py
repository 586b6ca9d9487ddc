"""Runs untrusted Python programs, and tests of them, in a sandbox. SECURITY.md says what it guarantees."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

Confinement = Literal["bubblewrap", "namespaces", "landlock", "none"]
CONFINEMENTS: tuple[Confinement, ...] = ("bubblewrap", "namespaces", "landlock")  # the strongest that works is taken

_INSIDE = Path(__file__).resolve().with_name("sandboxed")
_PYTHON = os.path.realpath(sys.executable)
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_GRACE_S = 30.0  # to start, kill and clean up on a busy machine
_FIRST_UID, _NUM_UIDS = 200_000, 1 << 30  # above the user ids of people
_FEW_UIDS = 10_000
_CHANGE_USER, _MANAGE_SYSTEM = 1 << 6 | 1 << 7, 1 << 21  # CAP_SETGID and CAP_SETUID, CAP_SYS_ADMIN
_SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class SandboxUnavailableError(ValueError):
    """The system offers no sandbox, and programs may not run without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The time, memory and output that programs may use."""

    timeout_s: float = 10.0  # wall clock of all runs together; the CPU time of each process is limited to the same
    memory_mb: int = 512  # address space of each process
    disk_mb: int = 16  # files of each process, which are kept in memory
    max_output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The output of a program and how it ended."""

    stdout: str
    stderr: str  # only the end of it
    exit_code: int | None  # negative: the signal that ended it; None: it was killed at a limit
    timed_out: bool


def run_python(
    source: str, *, stdin: str = "", limits: SandboxLimits | None = None, unsafe: bool = False
) -> SandboxResult:
    """Runs a program as __main__; raises RuntimeError if the sandbox itself fails."""
    return run_inputs(source, [stdin], limits=limits, unsafe=unsafe)[0]


def run_inputs(
    source: str, stdins: Sequence[str], *, limits: SandboxLimits | None = None, unsafe: bool = False
) -> list[SandboxResult]:
    """Runs a program once for each input, each time in a process and a folder of its own."""
    report = _supervised(source, limits or SandboxLimits(), choose_confinement(unsafe), stdins=stdins)
    return [SandboxResult(**run) for run in report["runs"]]


def run_tests(
    source: str, tests: Sequence[str], *, limits: SandboxLimits | None = None, unsafe: bool = False
) -> list[bool]:
    """Returns for each test (Python statements) whether it passes with what the program defines.

    Each test gets two fresh processes: its own, and one for the program, which sees the arguments of the test's calls
    and nothing else of the test.
    """
    report = _supervised(source, limits or SandboxLimits(), choose_confinement(unsafe), tests=tests)
    return [bool(passed) for passed in report["passed"]]


def hides_packages() -> bool:
    """Returns whether programs cannot import installed packages, because these lie in the folder of the programs."""
    return any(path.startswith("/tmp/") for path in _package_folders())


@lru_cache
def choose_confinement(unsafe: bool = False) -> Confinement:
    """Returns the strongest confinement that works here; raises SandboxUnavailableError if none does."""
    if sys.platform != "linux":
        raise SandboxUnavailableError("Programs of responses can run in a sandbox on Linux only.")
    reasons = []
    for confinement in CONFINEMENTS:
        try:
            (run,) = _supervised("import decimal, json", SandboxLimits(), confinement, stdins=[""])["runs"]
        except RuntimeError as error:
            reasons.append(f"{confinement}: {error}")
            continue
        if run["exit_code"]:
            reasons.append(f"{confinement}: Python does not work in it: {run['stderr'][-300:]}")
            continue
        logger.info("Programs run in a sandbox by %s.", confinement)
        if confinement != "landlock" and hides_packages():
            logger.warning(
                "Programs import the standard library only, without installed packages such as numpy: these are in "
                "/tmp, and each program has a /tmp of its own. Put Python's environment in another folder."
            )
        return confinement
    if unsafe:
        logger.warning("This system allows no sandbox; by --code.unsafe programs run all the same, as your own user.")
        return "none"
    raise SandboxUnavailableError(
        "This system allows no sandbox for the programs of responses. Install bubblewrap, allow user namespaces, or "
        "use Linux 5.13 or newer with Landlock. In a container or machine that holds nothing of value, "
        f"--code.unsafe True runs them without one. Tried: {'; '.join(reasons)}"
    )


# ---- One sandbox -----------------------------------------------------------------------------------------------------


def _supervised(
    source: str,
    limits: SandboxLimits,
    confinement: Confinement,
    *,
    stdins: Sequence[str] = (),
    tests: Sequence[str] = (),
) -> dict[str, Any]:
    """Starts a supervisor and returns its report."""
    paths = _paths_of_python()
    uid = _own_uid(confinement, paths)
    request = {
        "confinement": confinement,
        "source": source,
        "stdins": list(stdins),
        "num_tests": len(tests),
        "timeout_s": limits.timeout_s,
        "memory_mb": limits.memory_mb,
        "disk_mb": limits.disk_mb,
        "max_output_bytes": limits.max_output_bytes,
        "paths": paths,
        "packages": _package_folders(),
        "uid": uid,
    }
    command = [_PYTHON, "-I", "-S", str(_INSIDE / "launcher.py")]
    if confinement == "bubblewrap":
        command = [*_bubblewrap(paths, as_root=uid is not None), *command]
    # Not in the request: the program's process is forked from the supervisor, which must therefore not hold the tests.
    tests_file = os.memfd_create("tests")
    try:
        with open(tests_file, "wb", closefd=False) as file:
            file.write(json.dumps(list(tests)).encode())
        report = _launch(command, {**request, "tests_file": tests_file}, limits.timeout_s + _GRACE_S)
    finally:
        os.close(tests_file)
    if "error" in report:
        raise RuntimeError(f"The sandbox could not be set up: {report['error']}")
    return report


def _launch(command: Sequence[str], request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    # The environment is built from scratch, so it contains no API key.
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(request["tests_file"],),
            cwd="/",
            env=_ENVIRONMENT,
        )
    except OSError as error:
        raise RuntimeError(f"{command[0]} could not be started: {error}") from error
    with process:
        try:
            output, errors = process.communicate(json.dumps(request).encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise RuntimeError(f"The sandbox did not end within {timeout_s:g} s.") from None
    if process.returncode != 0 or not output:
        shown = errors.decode(errors="replace")[-1000:]
        raise RuntimeError(f"The sandbox failed with exit code {process.returncode}: {shown}")
    report: dict[str, Any] = json.loads(output)
    return report


def _bubblewrap(paths: Sequence[str], *, as_root: bool) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise RuntimeError("bwrap is not installed")
    if not as_root and os.geteuid() == 0 and _may(_CHANGE_USER):  # the other sandboxes give them a real user id
        raise RuntimeError("bwrap leaves programs root's real user id, whose threads the kernel does not limit")
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--as-pid-1", "--die-with-parent", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    command += ["--cap-add", "CAP_SETPCAP"]  # for the supervisor, which drops capabilities in each program's process
    if as_root:  # the supervisor gives the programs a user id of their own
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        command += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    folders = {str(folder) for path in (*paths, _PYTHON, *_DEVICES) for folder in Path(path).parents}
    for folder in sorted(folders - {"/"}):  # by default bwrap would close them to the programs' user
        command += ["--dir", folder]
    for path in (*paths, _PYTHON):
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    return [*command, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", "--"]


@lru_cache
def _paths_of_python() -> list[str]:
    """Returns the paths that Python reads: its library, packages, shared libraries, and the sandbox's own files."""
    base = os.path.realpath(sysconfig.get_path("stdlib"))
    wanted = [*_SYSTEM_PATHS, f"{os.path.realpath(sys.base_prefix)}/lib", base, *_package_folders(), str(_INSIDE)]
    links = [path for path in wanted if os.path.islink(path)]
    real = sorted({os.path.realpath(path) for path in wanted if os.path.exists(path)})
    # A path inside another one is covered already; a folder sorts before its contents.
    kept = [path for path in real if not any(path.startswith(f"{other}/") for other in real)]
    return [*kept, *dict.fromkeys(links)]


@lru_cache
def _package_folders() -> list[str]:
    names = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    names += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return list(dict.fromkeys(os.path.realpath(name) for name in names if os.path.isdir(name)))


def _own_uid(confinement: Confinement, paths: Sequence[str]) -> int | None:
    """Returns an unused user id, so that programs started by root are not root; None if there is none to use."""
    has_own_root = confinement in ("bubblewrap", "namespaces")
    if os.geteuid() != 0 or not _may(_CHANGE_USER | (_MANAGE_SYSTEM if has_own_root else 0)):
        return None
    if not has_own_root and not all(_is_open_to_all(path) for path in paths):
        return None  # Python is in root's home, which only root can enter: programs keep root's id without its powers
    count = int(Path("/proc/self/uid_map").read_text().split()[2])
    if count > _FIRST_UID + _NUM_UIDS:
        return _FIRST_UID + secrets.randbelow(_NUM_UIDS)
    return count - 2 - secrets.randbelow(1000) if count > _FEW_UIDS else None  # in a container that has its own ids


def _may(capabilities: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))
    return effective & capabilities == capabilities


def _is_open_to_all(path: str) -> bool:
    folders = itertools.takewhile(lambda folder: folder != Path("/"), Path(path).parents)
    return bool(os.stat(path).st_mode & 0o004) and all(folder.stat().st_mode & 0o001 for folder in folders)
