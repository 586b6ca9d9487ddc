"""Supervises the processes of one sandbox: reads a request from stdin, and writes a report to stdout.

sandbox.py starts this file in a separate Python process. It holds no expected values: only the checker reads the tests,
from a file that the program's process does not have.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

for _depth, _name in ((2, "lightrl"), (1, "lightrl.rewards")):  # found here, without running lightrl/__init__.py
    if _name not in sys.modules:
        sys.modules[_name] = ModuleType(_name)
        sys.modules[_name].__path__ = [str(Path(__file__).parents[_depth])]

from lightrl.rewards.sandboxed.checker import check  # noqa: E402
from lightrl.rewards.sandboxed.namespaces import leave_the_system  # noqa: E402
from lightrl.rewards.sandboxed.program import run_program, serve_program  # noqa: E402
from lightrl.rewards.sandboxed.restrictions import confine, die_with_parent, make_countable  # noqa: E402

_SHOWN_ERRORS = 2000  # bytes at the end of standard error
_SLOW_IMPORTS = ("numpy", "scipy", "pandas", "sympy")  # loaded once for all processes, not in each


def main() -> None:
    """Carries out the request in the confinement that it names."""
    request = json.loads(sys.stdin.buffer.read())
    die_with_parent()
    try:
        report = _in_namespaces(request) if request["confinement"] == "namespaces" else _supervise(request)
    except (OSError, ValueError) as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    if report is not None:
        sys.stdout.write(json.dumps(report))


def _in_namespaces(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Supervises from the first process of new namespaces; when it ends, everything in them ends."""
    if request["uid"] is None:
        make_countable()
    leave_the_system(request["paths"], as_root=request["uid"] is not None)
    first = os.fork()
    if first == 0:
        die_with_parent()
        return _supervise(request)
    os.waitpid(first, 0)
    return None


def _supervise(request: Mapping[str, Any]) -> dict[str, Any]:
    sys.path += request["packages"]
    _load_slow_imports(request)
    deadline = time.monotonic() + request["timeout_s"]
    passed = [_run_test(request, number, deadline) for number in range(request["num_tests"])]
    runs = [_run_program(request, stdin, deadline) for stdin in request["stdins"]]
    return {"passed": passed, "runs": runs}


def _load_slow_imports(request: Mapping[str, Any]) -> None:
    count = request["num_tests"] + len(request["stdins"])
    for name in _SLOW_IMPORTS if count > 1 else ():
        if f"import {name}" in request["source"] or f"from {name}" in request["source"]:
            with suppress(Exception):
                __import__(name)


# ---- Runs ----------------------------------------------------------------------------------------------------------


def _run_program(request: Mapping[str, Any], stdin: str, deadline: float) -> dict[str, Any]:
    """Runs the program once and returns its output and how it ended."""
    if time.monotonic() >= deadline:
        return {"stdout": "", "stderr": "", "exit_code": None, "timed_out": True}
    source = request["source"]
    given = _sealed(stdin)
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    pid = _start(request, (given, out_end, err_end), lambda: run_program(source))
    for end in (given, out_end, err_end):
        os.close(end)
    try:
        output, errors, status, ended_in_time = _watch(pid, (out, err), deadline, request["max_output_bytes"])
    finally:
        _end([pid])
        os.close(out)
        os.close(err)
    return {
        "stdout": output.decode(errors="replace"),
        "stderr": errors.decode(errors="replace"),
        "exit_code": None if status is None else os.waitstatus_to_exitcode(status),
        "timed_out": not ended_in_time,
    }


def _run_test(request: Mapping[str, Any], number: int, deadline: float) -> bool:
    """Runs one test in a checker, which requests values from a fresh process of the program."""
    if time.monotonic() >= deadline:
        return False
    source, tests = request["source"], request["tests_file"]
    nothing = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)
    to_program, from_program, verdict = os.pipe(), os.pipe(), os.pipe()
    streams = (nothing[0], nothing[1], nothing[1])
    # The program's process is forked first, so it cannot inherit the file that the checker reads.
    program = _start(request, (*streams, to_program[0], from_program[1]), lambda: serve_program(source, 3, 4))
    ends = (*streams, from_program[0], to_program[1], verdict[1], tests)
    checker = _start(request, ends, lambda: check(number, (3, 4), 5, 6))
    for end in {*nothing, *to_program, *from_program, verdict[1]}:
        os.close(end)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(verdict[0], selectors.EVENT_READ)
            is_ready = selector.select(max(0.0, deadline - time.monotonic()))
            return bool(is_ready) and os.read(verdict[0], 1) == b"1"
    finally:
        _end([checker, program])
        os.close(verdict[0])


def _sealed(text: str) -> int:
    """Returns an in-memory file that a process can read but not enlarge."""
    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as stream:
        stream.write(text.encode(errors="surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


# ---- Processes -----------------------------------------------------------------------------------------------------


def _start(request: Mapping[str, Any], files: tuple[int, ...], body: Callable[[], int]) -> int:
    """Forks a confined process whose only files are the given ones, as 0, 1, 2, ...; returns its process id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_confined(request, files, writer, body)
    os.close(writer)
    with open(reader, "rb") as stream:
        told = stream.read()  # until the process is confined
    if told != b"confined":
        _end([pid])
        raise OSError(told.decode(errors="replace") or "a process ended before it was confined")
    return pid


def _be_confined(request: Mapping[str, Any], files: tuple[int, ...], report: int, body: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        report = _move_files(files, report)
        os.chdir("/")
        try:
            confine(request, request["uid"])
        except BaseException as error:
            os.write(report, f"{type(error).__name__}: {error}".encode())
            raise
        os.write(report, b"confined")
        os.close(report)
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def _move_files(files: tuple[int, ...], report: int) -> int:
    """Renumbers the files to 0, 1, 2, ... and the report to the next number; closes all other files."""
    wanted = (*files, report)
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 20) for file in wanted]
    for index, copy in enumerate(copies):
        os.dup2(copy, index, inheritable=True)
    os.closerange(len(wanted), 1024)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    return len(files)


def _watch(
    pid: int, streams: tuple[int, int], deadline: float, max_bytes: int
) -> tuple[bytes, bytes, int | None, bool]:
    """Returns output, end of standard error, wait status (None: still running), and whether it finished in time."""
    texts = dict.fromkeys(streams, b"")
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return texts[streams[0]], texts[streams[1]], None, False
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                texts[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
            texts[streams[1]] = texts[streams[1]][-_SHOWN_ERRORS:]
            if len(texts[streams[0]]) > max_bytes:
                return texts[streams[0]][:max_bytes], texts[streams[1]], None, True
    status = _wait(pid, deadline)
    return texts[streams[0]], texts[streams[1]], status, status is not None


def _wait(pid: int, deadline: float) -> int | None:
    """Returns the wait status once the process has ended; a program may close its output long before."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.001)


def _end(pids: list[int]) -> None:
    """Kills and reaps the processes; a confined one has started no other."""
    for pid in pids:
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
