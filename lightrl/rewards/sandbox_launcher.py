"""Runs one untrusted Python program and reports how it ended. sandbox.py starts this file by `python -I`.

It imports the standard library only. It is a process of its own, so the changes it makes to itself end with it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 0x08000000, 0x10000000, 0x20000000, 0x40000000  # of unshare(2)
_SET_PARENT_DEATH_SIGNAL, _KEEP_CAPABILITIES, _CHILD_SUBREAPER, _NO_NEW_PRIVILEGES = 1, 8, 36, 38  # of prctl(2)
_CAPABILITY_VERSION, _MAY_READ_ALL = 0x20080522, 1 << 2  # of capset(2): CAP_DAC_READ_SEARCH
_FIRST_UID = 200_000  # above those that people have
_MAX_PROCESSES = 16  # and threads
_MAX_FILE_BYTES = 16 << 20
_MAX_OPEN_FILES = 64
_REAP_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Reads a request from stdin and writes the report to stdout."""
    request = json.load(sys.stdin)
    folder = Path(tempfile.mkdtemp(prefix="lightrl-sandbox-"))
    try:
        report = _run(request, folder)
    except OSError as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(json.dumps(report))


def _run(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    _libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the program become ours, so that they can be found
    has_namespaces = request["use_namespaces"] and _leave_namespaces()
    uid = _FIRST_UID + os.getpid() if os.geteuid() == 0 else None
    work = folder / "work"
    work.mkdir()
    if uid is not None:
        folder.chmod(0o711)
        os.chown(work, uid, uid)
    (folder / "stdin").write_text(request["stdin"])
    # Opened here: a program with our user id could replace the file.
    stderr = os.open(folder / "stderr", os.O_RDWR | os.O_CREAT, 0o600)
    has_begun = mmap.mmap(-1, 1)  # shared with the program's process until the program runs
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_the_program(request, folder, (writer, stderr), has_begun, uid, has_namespaces)
    os.close(writer)
    try:
        output, status, ended_in_time = _watch(pid, reader, request["timeout_s"], request["max_output_bytes"])
    finally:
        _kill_all(pid)
    errors = _end_of(stderr)
    if status is not None and not has_begun[0]:
        return {"error": errors}
    return {
        "stdout": output.decode(errors="replace"),
        "stderr": errors,
        "exit_code": None if status is None else os.waitstatus_to_exitcode(status),
        "timed_out": not ended_in_time,
        "has_namespaces": has_namespaces,
    }


def _end_of(file: int) -> str:
    start = max(0, os.fstat(file).st_size - 2000)
    return os.pread(file, 2000, start).decode(errors="replace")


def _leave_namespaces() -> bool:
    """Takes the network away and ties all processes to the first one; returns False if the system does not allow it.

    Root enters no user namespace: there the program could have no user id of its own, and would keep root's files.
    """
    flags = _NEW_PID | _NEW_NET | _NEW_IPC
    return bool(_libc.unshare(flags if os.geteuid() == 0 else flags | _NEW_USER) == 0)


# ---- The program's side ------------------------------------------------------------------------------------------


def _become_the_program(
    request: Mapping[str, Any],
    folder: Path,
    outputs: tuple[int, int],  # stdout and stderr
    has_begun: mmap.mmap,
    uid: int | None,
    has_namespaces: bool,
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _redirect(folder, *outputs)
        os.chdir(folder / "work")
        if uid is not None:
            _stop_being_root(uid)
        _set_limits(request, has_namespaces)
        _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if not has_namespaces:
            sys.addaudithook(_refuse)
        has_begun[0] = 1
        has_begun.close()
        code = _execute(request["source"])
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def _redirect(folder: Path, stdout: int, stderr: int) -> None:
    stdin = os.open(folder / "stdin", os.O_RDONLY)
    for fd, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
    os.closerange(3, 256)
    # The launcher has read its own stdin to the end; these are new files under the same numbers.
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)


def _stop_being_root(uid: int) -> None:
    """Takes a user id that nobody else has, so that the limit of processes counts the program's alone."""
    must_read_all = not _is_open_to_all(Path(os.__file__))
    if must_read_all:  # a Python under /root: keep the right to read its library, and no other
        _libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    if must_read_all:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        data = (ctypes.c_uint32 * 6)(_MAY_READ_ALL, _MAY_READ_ALL, 0, 0, 0, 0)
        if _libc.capset(header, data) != 0:
            raise OSError(ctypes.get_errno(), "capset")


def _is_open_to_all(path: Path) -> bool:
    folders = path.resolve().parents
    return bool(path.stat().st_mode & 0o004) and all(folder.stat().st_mode & 0o001 for folder in folders)


def _set_limits(request: Mapping[str, Any], has_namespaces: bool) -> None:
    cpu_s = max(1, round(request["timeout_s"] + 0.5))
    memory = int(request["memory_mb"]) << 20
    # A new user id or namespace starts to count at 0; otherwise all that the user runs is counted.
    others = 0 if has_namespaces or os.geteuid() >= _FIRST_UID else _count_own_threads()
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: _MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_NPROC: others + _MAX_PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))


def _count_own_threads() -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            count += len(list((folder / "task").iterdir())) if folder.stat().st_uid == os.getuid() else 0
    return count


def _refuse(event: str, _args: Any) -> None:
    """Stops Python's own sockets and signals; a program that makes system calls without Python is not stopped."""
    if event.startswith("socket."):
        raise PermissionError("the sandbox has no network")
    if event in ("os.kill", "os.killpg"):  # without namespaces these may be the trainer's processes
        raise PermissionError("the sandbox sends no signals")


def _execute(source: str) -> int:
    try:
        exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as request:
        return request.code if isinstance(request.code, int) else int(request.code is not None)
    return 0


# ---- The launcher's side -----------------------------------------------------------------------------------------


def _watch(pid: int, reader: int, timeout_s: float, max_bytes: int) -> tuple[bytes, int | None, bool]:
    """Returns the program's output, its wait status (None if it is still running), and whether it ended in time."""
    deadline = time.monotonic() + timeout_s
    output, is_open = b"", True
    while time.monotonic() < deadline:
        # A grandchild may hold the pipe open after the program itself has ended, so both are looked at.
        ready = is_open and select.select([reader], [], [], 0.02)[0]
        if not is_open:
            time.sleep(0.005)
        if ready:
            part = os.read(reader, 1 << 16)
            is_open = bool(part)
            output += part
            if len(output) > max_bytes:
                return output[:max_bytes], None, True
        elif (ended := os.waitpid(pid, os.WNOHANG))[0]:
            return output, ended[1], True
    return output, None, False


def _kill_all(pid: int) -> None:
    """Kills the program's process group, then those of its descendants that this process has inherited."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    deadline = time.monotonic() + _REAP_S
    while time.monotonic() < deadline:
        for child in children.read_text().split() if children.exists() else []:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(child), signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
