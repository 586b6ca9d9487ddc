"""Prints why a process ends, and hands the reason to torchrun, whose own report comes last."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


def leave_error(text: str) -> None:
    """Writes the error where torchrun reads it after this rank has ended; only the first error of a rank is kept.

    Without this file torchrun prints a link to torch's documentation. The format is that of its own error handler:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/multiprocessing/errors/error_handler.py
    """
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not path.name or path.exists():
        return
    part = path.with_suffix(".part")  # torchrun fails if it reads half a file, and it may end a rank that is writing
    with suppress(OSError):
        part.write_text(json.dumps({"message": text, "timestamp": str(int(time.time()))}), encoding="utf-8")
        part.replace(path)


def print_last_word(text: str) -> None:
    """Prints the reason why this rank ends, after its number if there are several, and hands it to torchrun."""
    rank = os.environ.get("RANK")
    where = f"[rank {rank}] " if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    sys.stderr.write(f"{where}{text}\n")
    sys.stderr.flush()
    leave_error(text)


def exit_interrupted() -> NoReturn:
    """Ends the process after Ctrl-C, without a traceback, with code 130."""
    print_last_word("interrupted")
    raise SystemExit(130)
