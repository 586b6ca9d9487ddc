"""Says in one clause why a path that a user gave cannot be read, or why nothing can be written there."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def why_unreadable(path: str | Path, *, is_folder: bool = False) -> str:
    """Returns why a file, or a folder, cannot be read, to follow its name and a colon; empty if it can be."""
    kind = "folder" if is_folder else "file"
    try:
        os.stat(path)
    except OSError as error:
        return _why_absent(Path(path), error) or f"there is no such {kind}"
    if not (os.path.isdir(path) if is_folder else os.path.isfile(path)):
        other = "folder" if os.path.isdir(path) else "file" if is_folder else "device or a pipe"
        return f"it is a {other}, not a {kind}"
    may = os.access(path, os.R_OK | os.X_OK if is_folder else os.R_OK)
    return "" if may else f"it may not be read ({os.strerror(errno.EACCES)})"


def why_unwritable(path: str | Path) -> str:
    """Returns why nothing new can be made at a path, to follow its name and a colon; empty if it can be.

    Parent folders that are missing can be made. What is there already is the caller's question.
    """
    path = Path(path).absolute()
    try:
        os.stat(path)
    except OSError as error:
        if why := _why_absent(path, error):
            return why
    nearest = next(folder for folder in path.parents if os.path.lexists(folder))
    may = os.access(nearest, os.W_OK | os.X_OK)
    return "" if may else f"{nearest} takes no files ({os.strerror(errno.EACCES)})"


def why_no_output(path: str | Path) -> str:
    """Returns why a file cannot be written, perhaps over an older one; empty if it can be."""
    if os.path.isdir(path):
        return "it is a folder, not a file"
    if not os.path.exists(path):
        folder = Path(path).absolute().parent
        return why_unwritable(path) or ("" if os.path.isdir(folder) else f"there is no folder {folder}")
    return "" if os.access(path, os.W_OK) else f"it may not be replaced ({os.strerror(errno.EACCES)})"


def _why_absent(path: Path, error: OSError) -> str:
    """Returns what is in the way of a path that stat() refused; empty if it is only missing."""
    for part in (path, *path.parents):  # in any order: at most one of them is in the way
        where = "it is" if part == path else f"{part} is"
        if os.path.islink(part) and not os.path.exists(part):
            return f"{where} a broken symbolic link to {os.readlink(part)}"
        if os.path.exists(part) and not os.path.isdir(part):
            return f"it is below the file {part}"
    return "" if isinstance(error, FileNotFoundError) else str(error.strerror)
