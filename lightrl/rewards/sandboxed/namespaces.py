"""Isolates this process: its own process ids, network and memory segments, and a read-only root with only Python."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

# Of unshare(2), mount(2), umount2(2) and mount_setattr(2).
_NEW_MOUNTS, _NEW_CGROUP, _NEW_UTS, _NEW_IPC = 0x20000, 0x02000000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_NO_SUID, _NO_DEV, _NO_EXEC, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_ATTRIBUTE_READ_ONLY, _AT_CURRENT_FOLDER, _AT_RECURSIVE = 1, -100, 0x8000
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_STAGE = "/usr"  # any folder that every system has; only this process sees what is mounted over it
_DEVICES = ("null", "zero", "random", "urandom")
WORK = "/tmp"  # the only folder in which a program can write
_UID = 1000  # in the user namespace, if the user is not root
_libc = ctypes.CDLL(None, use_errno=True)


def leave_the_system(paths: Sequence[str], *, as_root: bool) -> None:
    """Enters new namespaces in which only the given paths exist; the first child becomes their process 1.

    Root needs no user namespace for this. Outside of one, it can give the programs a user id of their own.
    """
    flags = _NEW_MOUNTS | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_CGROUP
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(flags if as_root else flags | _NEW_USER), "unshare")
    if not as_root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{_UID} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{_UID} {gid} 1")
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", _STAGE, "tmpfs", _NO_SUID | _NO_DEV, "mode=755")
    for name in ("new", "old"):
        os.mkdir(f"{_STAGE}/{name}")
    _pivot(_STAGE, f"{_STAGE}/old")
    _mount("tmpfs", "/new", "tmpfs", _NO_SUID | _NO_DEV, "size=1m,mode=755")
    _fill(paths)
    os.chdir("/new")
    _pivot(".", ".")
    _check(_libc.umount2(b".", _DETACH), "umount2")
    os.chdir("/")


def mount_own_folder(uid: int, size_mb: int) -> None:
    """Gives this process alone an empty folder in memory."""
    _check(_libc.unshare(_NEW_MOUNTS), "unshare")
    options = f"size={size_mb}m,nr_inodes=4096,mode=700,uid={uid},gid={uid}"
    _mount("tmpfs", WORK, "tmpfs", _NO_SUID | _NO_DEV | _NO_EXEC, options)


def _fill(paths: Sequence[str]) -> None:
    for path in paths:
        old, new = f"/old{path}", f"/new{path}"
        if os.path.islink(old):
            os.symlink(os.readlink(old), new)
            continue
        _make_place(old, new)
        _mount(old, new, None, _BIND | _RECURSIVE)
        _restrict_mount(new, _ATTRIBUTE_READ_ONLY | _NO_SUID | _NO_DEV, _AT_RECURSIVE)
    for name in _DEVICES:
        _make_place(f"/old/dev/{name}", f"/new/dev/{name}")
        _mount(f"/old/dev/{name}", f"/new/dev/{name}", None, _BIND)
    os.makedirs(f"/new{WORK}", exist_ok=True)
    _restrict_mount("/new", _ATTRIBUTE_READ_ONLY | _NO_SUID | _NO_DEV, 0)


def _make_place(old: str, new: str) -> None:
    if os.path.isdir(old):
        os.makedirs(new, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(new), exist_ok=True)
        Path(new).touch()


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _restrict_mount(target: str, attributes: int, flags: int) -> None:
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    call = (_MOUNT_SETATTR, _AT_CURRENT_FOLDER, os.fsencode(target), flags, ctypes.byref(wanted), size)
    _check(_libc.syscall(*call), f"mount_setattr {target}")


def _pivot(new: str, old: str) -> None:
    number = _PIVOT_ROOT.get(os.uname().machine, -1)
    _check(_libc.syscall(number, os.fsencode(new), os.fsencode(old)), "pivot_root")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
