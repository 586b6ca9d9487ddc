"""PeerWatch: detects which ranks of a run with separate roles have ended, and why.

Trainer rank 0 and all other ranks of both roles listen to each other over connections that carry no data: a receive
ends only with the peer's farewell, or with its process.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import torch

from lightrl.process_group import store_of, watch_group
from lightrl.rank_board import RankBoard
from lightrl.roles import Role

_TAG = 7
_LEAVING_S = 30.0  # a thread that is left behind aborts the process if its peer ends while the interpreter does
_NEWS_S = 1.0  # an error may be seen before the process that caused it has ended


class PeerWatch:
    """Tells this rank whether and how other ranks have ended."""

    def __init__(self, role: Role) -> None:
        self.lost: list[int] = []  # ranks of the whole run
        self._role = role
        names = ("trainer", "rollout")
        own = [role.rank if role.name == name else -1 for name in names]
        sizes = (role.num_trainers, role.num_rollout)
        self._boards = {
            name: RankBoard(store_of(name), rank, size) for name, rank, size in zip(names, own, sizes, strict=True)
        }
        self._threads: dict[int, threading.Thread] = {}

    def begin(self) -> None:
        """Connects the ranks; every rank of both roles must call it."""
        role, me = self._role, self._role.place
        size = role.num_trainers + role.num_rollout
        self._group: Any = watch_group(me, size)
        peers = range(1, size) if me == 0 else [0]
        self._threads = {peer: threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in peers}
        for thread in self._threads.values():
            thread.start()

    def failure(self) -> str:
        """Returns the reports of failed ranks, or that they are gone; empty if all is well."""
        return self._said(self._role.other) or (self._describe_lost() if self.lost else "")

    def failure_soon(self) -> str:
        """Returns failure() after waiting for it a moment, since a broken collective may be noticed first."""
        deadline = time.monotonic() + _NEWS_S
        while not (found := self.failure()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def report(self, error: BaseException) -> None:
        """Posts the reason why this rank leaves, for the other role to read."""
        self._boards[self._role.name].post_error(error)

    def end(self) -> None:
        """Says farewell, so that this rank's end is not taken for a failure, and waits a while for other ranks."""
        for peer in self._threads:
            with suppress(RuntimeError):  # the peer has gone first
                self._group.send([torch.zeros(1)], peer, _TAG).wait()
        deadline = time.monotonic() + _LEAVING_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = {}

    def _listen(self, peer: int) -> None:
        try:
            self._group.recv([torch.zeros(1)], peer, _TAG).wait()
        except RuntimeError:
            self.lost.append(peer)

    def _describe_lost(self) -> str:
        """Returns the errors that ended ranks have posted, after a short wait, or a sentence that they posted none."""
        self._boards[self._role.other].errors_of_others()  # waits
        said = "\n".join(filter(None, map(self._said, self._boards)))
        names = ", ".join(map(self._role.name_of, sorted(self.lost)))
        return said or (
            f"{names} is gone: the process has ended and posted no error. torchrun's report names its exit code or "
            "signal."
        )

    def _said(self, role: str) -> str:
        """Returns the errors that ranks of a role, other than this one, have posted."""
        errors = self._boards[role].errors_now()
        return "\n".join(f"{role} rank {rank} failed:\n{errors[rank]}" for rank in sorted(errors))
