"""Ends a child process that a user's code has forked and let return into lightrl.

It has this rank's connections and files, so two processes would be one rank. A child that is ended by os._exit() never
comes back, as those of multiprocessing and subprocess do not.
"""

from __future__ import annotations

import os
from typing import NoReturn


def end_child(process: int) -> NoReturn:
    """Ends this process, which finds that it is no longer `process` but a child of it."""
    text = (
        f"[rank {os.environ.get('RANK', '0')}] Process {os.getpid()} is a child that code of yours, such as a reward, "
        "has made by os.fork() and left by a return or an exception, as that of exit(). It ends here, because it would "
        f"go on as a second copy of process {process}, which does go on. End such a child by os._exit(), or use "
        "subprocess or multiprocessing.\n"
    )
    os.write(2, text.encode())
    os._exit(1)
