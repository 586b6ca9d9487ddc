"""One owner of a run's folder: a second run on the same --output_dir is refused while the first one lives.

Rank 0 holds a record lock (fcntl) on owner.json. The kernel drops it when the process ends, however it ends, so the
next start takes over. Network file systems pass such locks on to other hosts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

OWNER_NAME = "owner.json"  # host and pid of the process that writes the run's files, for people and for the refusal

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # what a file system without locks answers


class _Owned(NamedTuple):
    descriptor: int  # open while this process owns the folder: closing it drops the lock
    made: list[Path]  # folders that own() made, the innermost first


_owned: dict[Path, _Owned] = {}  # by folder


def own(root: Path) -> None:
    """Makes this process the only one that writes a run's folder; raises ValueError if another one does.

    A process that owns a folder may open it again.
    """
    if root in _owned and _is_same_file(_owned[root].descriptor, root / OWNER_NAME):
        return
    made = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(root)
    record = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **_start(os.getpid()), "since": _now()})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{record}\n".encode(), 0)
    _owned[root] = _Owned(descriptor, made)


def disown(root: Path | None = None) -> None:
    """Gives back a folder, or all of this process, and removes it if it holds nothing else and was made for the run."""
    for folder in [root] if root is not None else list(_owned):
        if folder in _owned:
            descriptor, made = _owned.pop(folder)
            with suppress(OSError):  # the folder may be gone, or read-only by now
                if _is_same_file(descriptor, folder / OWNER_NAME):
                    (folder / OWNER_NAME).unlink()
                for path in made:
                    path.rmdir()
            os.close(descriptor)


def _lock(root: Path) -> int:
    """Returns the descriptor of the locked file."""
    path = root / OWNER_NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _check_owner(root, _read(descriptor), error)
        if _is_same_file(descriptor, path):
            return descriptor
        os.close(descriptor)  # its owner has ended and removed the file meanwhile


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


# ---- What another process wrote --------------------------------------------------------------------------------------


def _check_owner(root: Path, owner: dict[str, Any], error: OSError) -> None:
    """Raises ValueError if the folder has another owner that lives, or may live."""
    if error.errno in (errno.EACCES, errno.EAGAIN):
        raise _in_use(root, owner)
    if error.errno not in _NO_LOCKS:
        raise error
    if not owner or _is_ours(owner):
        return
    if owner.get("host") != socket.gethostname():
        raise _in_use(
            root, owner, f" Its file system knows no locks: if that run has ended, delete {OWNER_NAME} there."
        )
    if _start(int(owner["pid"])) == {"started": owner.get("started")} and _is_alive(int(owner["pid"])):
        raise _in_use(root, owner)


def _in_use(root: Path, owner: dict[str, Any], remedy: str = "") -> ValueError:
    who = f"process {owner.get('pid', 'unknown')} on host {owner.get('host', 'unknown')}"
    return ValueError(
        f"--output_dir {root} is in use by {who} since {owner.get('since', 'now')}. Wait for the end of that run, or "
        f"choose another folder.{remedy}"
    )


def _read(descriptor: int) -> dict[str, Any]:
    """Returns what the owner wrote; empty if it has just begun."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else {}
    except ValueError:
        return {}


def _is_ours(owner: dict[str, Any]) -> bool:
    return (owner.get("host"), owner.get("pid")) == (socket.gethostname(), os.getpid())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _start(pid: int) -> dict[str, Any]:
    """Returns when a process began, in ticks since the machine started: a pid alone may be that of a later one."""
    try:
        return {"started": int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])}
    except (OSError, IndexError, ValueError):
        return {"started": None}  # no such process, or no /proc


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
