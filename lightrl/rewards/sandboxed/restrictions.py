"""Restricts the memory, privileges, files and system calls of a process that runs an untrusted program."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightrl.rewards.sandboxed.namespaces import WORK, mount_own_folder
from lightrl.rewards.sandboxed.syscalls import restrict_system_calls

# Of prctl(2) and capset(2).
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _DROP_FROM_BOUNDING_SET, _NO_NEW_PRIVILEGES, _AMBIENT = 1, 4, 24, 38, 47
_CLEAR_ALL, _CAPABILITY_VERSION, _NUM_CAPABILITIES = 4, 0x20080522, 64
# Of Landlock: https://docs.kernel.org/userspace-api/landlock.html
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _PATH_BENEATH = 444, 445, 446, 1
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version; 16 from 5 on
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3

_MAX_THREADS = 64
_FIRST_REAL_UID = 1_000_000_000  # of no user
_MAX_OPEN_FILES = 64
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Makes the kernel kill this process as soon as its parent is gone."""
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def make_countable() -> None:
    """Gives a process of root a real user id of its own, if it may: the kernel does not limit the threads of root."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setresuid(_FIRST_REAL_UID + int.from_bytes(os.urandom(3), "big"), -1, -1)


def confine(request: Mapping[str, Any], uid: int | None) -> None:
    """Confines this process for good; raises OSError if the system does not support a requested restriction."""
    has_own_root = request["confinement"] in ("bubblewrap", "namespaces")
    if request["confinement"] == "landlock" and uid is None:
        make_countable()
    num_others = 0 if has_own_root else _count_own_threads()
    if has_own_root:
        mount_own_folder(os.geteuid() if uid is None else uid, request["disk_mb"])
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _drop_capabilities()
    if has_own_root:
        os.chdir(WORK)
    die_with_parent()  # after the change of user, which resets it
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # closes its memory to other processes of the same user
    _set_limits(request, num_others if uid is None else 0)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if request["confinement"] == "landlock":
        _restrict_files(request["paths"])
    try:
        restrict_system_calls(may_change_files=has_own_root)
    except OSError:
        if request["confinement"] != "none":
            raise


def _drop_capabilities() -> None:
    for capability in range(_NUM_CAPABILITIES):
        _libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    _libc.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if _libc.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _set_limits(request: Mapping[str, Any], num_others: int) -> None:
    limits = {
        resource.RLIMIT_CPU: max(1, round(request["timeout_s"] + 0.5)),
        resource.RLIMIT_AS: int(request["memory_mb"]) << 20,
        resource.RLIMIT_FSIZE: int(request["disk_mb"]) << 20,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_NPROC: num_others + _MAX_THREADS,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))


def _count_own_threads() -> int:
    """Counts the threads that already run as this user: without a namespace the kernel counts them, too."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            count += len(os.listdir(folder / "task")) if folder.stat().st_uid == os.getuid() else 0
        except OSError:
            continue
    return count


def _restrict_files(paths: Sequence[str]) -> None:
    """Uses Landlock to allow reading below the paths and no other use of files."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    files = (1 << _NUM_FILE_RIGHTS.get(version, 16)) - 1
    handled = (ctypes.c_uint64 * 3)(files, 3, 3)  # files; TCP; abstract sockets and signals to others
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path in (*paths, "/dev/null", "/dev/urandom"):
        _allow_reading(ruleset, path)
    if _libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


class _Rule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def _allow_reading(ruleset: int, path: str) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _Rule(_READ_FILE | _READ_FOLDER if os.path.isdir(path) else _READ_FILE, place)
    if _libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0) != 0:
        raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
    os.close(place)
