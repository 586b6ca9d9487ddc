"""Recomputes the hashes of the weights that a run has saved, and compares them with the stored hashes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from lightrl.config import exit_with_user_error, print_text
from lightrl.strategy.saving.state_files import HASH_FILE, recompute

_USAGE = "Usage: hash RUN..., where RUN is the folder of a run, one of its checkpoints, or a folder with saved weights."
_HELP = """\
usage: lightrl hash RUN...

Recompute the hashes of saved weights and compare them with those written beside them. RUN is the folder of a run, one
of its checkpoints, or a folder with saved weights. Equal weights have equal hashes, so name several folders to compare
them. The exit code is 1 if a hash differs from the one written beside it, or a file cannot be read."""


def main(argv: Sequence[str]) -> int:
    """Prints a line for each folder with weights; returns 1 if a stored hash does not match the files, else 0."""
    if list(argv) in (["-h"], ["--help"]):
        print_text(_HELP)
        return 0
    if not argv or any(name.startswith("-") for name in argv):
        print_text(_USAGE)
        return 2
    saved = [(Path(name), saved_folders(Path(name))) for name in argv]
    for root, folders in saved:
        if not folders:
            exit_with_user_error(ValueError(_describe_no_run(root)))
    code = 0
    for root, folders in saved:
        for folder in folders:
            found, problem = compared(folder)
            name = folder.name if folder == root else folder.relative_to(root).as_posix()
            shown = folder if len(saved) > 1 else name
            sys.stdout.write(f"{found}  {shown}{problem and f': {problem}'}\n")
            code |= problem.startswith(("differs", "cannot"))
    return int(code)


def saved_folders(root: Path) -> list[Path]:
    """Returns the folders with weights in a run's folder, sorted, or the folder itself if it has weights."""
    found = {path.parent for path in (*root.rglob("*.safetensors"), *root.rglob(HASH_FILE))}
    return sorted(folder for folder in found if not _is_hidden(folder.relative_to(root)))


def _is_hidden(path: Path) -> bool:
    """Returns whether a path leads through a folder that a save has not completed."""
    return any(part.startswith(".") for part in path.parts)


def compared(folder: Path) -> tuple[str, str]:
    """Returns the hash of the files and what, if anything, is wrong with the stored hash."""
    try:
        lines, stored = recompute(folder).splitlines(), folder / HASH_FILE
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        return "-" * 64, f"cannot be read ({error})"
    if not stored.is_file():
        return lines[0], f"no {HASH_FILE} to compare with"
    expected = [line for line in stored.read_text(errors="replace").splitlines() if line.strip()]
    if expected == lines:
        return lines[0], ""
    different = sorted(set(expected[1:]) ^ set(lines[1:])) or [HASH_FILE]
    first = different[0].split()[0]
    return lines[0], f"differs from {expected[0] if expected else 'an empty file'}, first in {first}"


def _describe_no_run(root: Path) -> str:
    reason = "holds no saved weights" if root.is_dir() else "is not a folder"
    return f"{root} {reason}. {_USAGE}"
