"""Compiles a C file of the package for the processor that it runs on, and loads it.

It takes about a second, so nothing is kept: a library from another machine could have instructions that this one lacks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_COMPILERS = ("gcc", "clang", "cc")
# Every access is to the type that was written, or by a vector of it, which the aliasing rules of C do not know.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing")
_LIMIT_S = 120


def compiled(source: Path, constants: Mapping[str, int]) -> ctypes.CDLL:
    """Compiles a C file with these macros and loads it; raises RuntimeError if there is no compiler or it fails.

    If the compiler has no OpenMP, the functions use one thread.
    """
    command = [*find_compiler(), *_FLAGS, *(f"-D{name}={int(value)}" for name, value in constants.items())]
    try:
        return _load([*command, "-fopenmp"], source)
    except RuntimeError as error:
        library = _load(command, source)
        logger.warning("The kernels use one thread: %s", error)
        return library


def _load(command: list[str], source: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="lightrl-c-", ignore_cleanup_errors=True) as folder:
        library = Path(folder) / f"{source.stem}.so"
        _run([*command, "-shared", "-fPIC", "-o", str(library), str(source), "-lm"])
        try:
            return ctypes.CDLL(str(library))  # stays loaded without its file
        except OSError as error:
            raise RuntimeError(
                f"Cannot load what was compiled in {folder}: {error}. If that file system forbids execution, "
                "set TMPDIR to another folder."
            ) from error


def find_compiler() -> list[str]:
    """Returns the command of the C compiler: $CC, or the first of gcc, clang and cc on the path."""
    try:
        asked = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise RuntimeError(f"CC is {os.environ['CC']!r}, which is no command: {error}.") from error
    command = asked or [name for name in _COMPILERS if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        given = f"CC is {os.environ['CC']!r}, which is not on the path" if asked else "gcc, clang and cc are missing"
        raise RuntimeError(f"A C compiler is needed: {given}. Install gcc, or set CC to a compiler.")
    return command


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"Cannot compile: {error}. Set CC to another compiler.") from error
    if done.returncode:
        raise RuntimeError(
            f"{shlex.join(command)} failed with exit code {done.returncode}; set CC to another compiler:\n"
            f"{done.stderr.strip()[-2000:]}"
        )
