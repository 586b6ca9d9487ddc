"""RankBoard: what each rank of a job is doing and why it left, where all ranks can read it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Protocol

from lightrl.forked import end_child
from lightrl.own_calls import called_own_code

_LONGEST_END = 100_000  # characters; torch's store breaks the connection at 8 MiB
_POSTED = "_lightrl_posted"  # marks an error that the other ranks were told of
_BETWEEN = "between two phases"


class Store(Protocol):
    """The part of torch's key-value store that the board uses."""

    def set(self, key: str, value: str) -> None:
        """Writes a value."""

    def get(self, key: str) -> bytes:
        """Returns a value."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether every key has a value."""


class RankBoard:
    """Posts this rank's phase and error, and reads those of the others."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._process = os.getpid()
        self._phases = ["start"]
        self._has_posted = False  # an error; keeping it would keep the tensors of its frames
        self._is_lost = False  # whether the store is gone: torch prints a warning at each further attempt

    @property
    def phase(self) -> str:
        """The innermost phase that this rank is in."""
        return self._phases[-1]

    def enter(self, phase: str) -> None:
        """Posts that this rank has begun a phase."""
        self.go_on()
        self._phases.append(phase)
        self._post_phase()

    def leave(self) -> None:
        """Posts that this rank is back in the enclosing phase."""
        self._phases.pop()
        if len(self._phases) == 1:
            self._phases = [_BETWEEN]
        self._post_phase()

    def post_error(self, error: BaseException) -> None:
        """Posts the traceback that this rank leaves with, and the innermost phase that it left."""
        if not (self._has_posted and _POSTED in error.__dict__):
            self._post(f"lightrl/failed in/{self._rank}", self.phase)
        self._has_posted = error.__dict__[_POSTED] = True
        self._post(f"lightrl/error/{self._rank}", describe(error))

    def go_on(self) -> None:
        """Withdraws an error that a program has caught; one with which this rank is still on its way out stays."""
        if os.getpid() != self._process:  # every collective begins with this call
            end_child(self._process)
        if self._has_posted and not _is_leaving():
            self._has_posted = False
            self._post(f"lightrl/error/{self._rank}", "")
            self._post(f"lightrl/failed in/{self._rank}", "")

    def errors_of_others(self) -> dict[int, str]:
        """Returns the tracebacks that other ranks posted, after a short wait: a broken connection travels faster."""
        for _ in range(10):
            errors = self.errors_now()
            if errors:
                return errors
            time.sleep(0.1)
        return {}

    def errors_now(self) -> dict[int, str]:
        """Returns the tracebacks that other ranks have posted and not withdrawn."""
        others = (rank for rank in range(self._world) if rank != self._rank)
        return {rank: text for rank in others if (text := self._posted("error", rank))}

    def post_result(self, what: str, text: str) -> None:
        """Posts how this rank's part of something has ended; any thread may call it."""
        self._post(f"lightrl/{what}/{self._rank}", text)

    def results(self, what: str, limit_s: float) -> list[str | None]:
        """Returns the result that each rank has posted for something, once all have; after the time limit, None."""
        keys = [f"lightrl/{what}/{rank}" for rank in range(self._world)]
        deadline = time.monotonic() + limit_s
        while not all(map(self._has, keys)) and not self._is_lost and time.monotonic() < deadline:
            time.sleep(0.1)
        return [self._store.get(key).decode() if self._has(key) else None for key in keys]

    def describe_errors(self, errors: Mapping[int, str], *, are_agreed: bool = False) -> str:
        """Returns a message that names the failed ranks and their phases, and holds their tracebacks.

        Errors that ranks agree on at the end of a phase are not posted, unless their rank has left by now.
        """
        unknown = ("", _BETWEEN) if are_agreed else ("",)
        posted = [self._posted("failed in", rank) for rank in sorted(errors)]
        phases = dict.fromkeys(self.phase if phase in unknown else phase for phase in posted)
        reports = "\n".join(f"--- rank {rank} ---\n{report}" for rank, report in sorted(errors.items()))
        where = " and ".join(map(_where, phases))
        return f"rank {', '.join(map(str, sorted(errors)))} failed {where}:\n{reports}"

    def describe_phases(self) -> str:
        """Returns a message that says which phase each rank was last seen in."""
        lines = [f"rank {self._rank} was in phase {self.phase!r}. Last word of the others:"]
        for rank in range(self._world):
            if rank != self._rank and (where := self.phase_of(rank)):
                lines.append(f"rank {rank} is {where}")
        return "\n".join(lines)

    def phase_of(self, rank: int) -> str:
        """Returns which phase a rank was last seen in, and since when; empty if it never said so."""
        name, _, since = self._posted("phase", rank).rpartition("|")
        return f"{_where(name)} since {time.time() - float(since):.0f} s" if since else ""

    def _post_phase(self) -> None:
        self._post(f"lightrl/phase/{self._rank}", f"{self.phase}|{time.time():.1f}")

    def _post(self, key: str, text: str) -> None:
        if os.getpid() != self._process:
            end_child(self._process)
        if self._is_lost:
            return
        try:
            self._store.set(key, text.encode(errors="backslashreplace").decode())  # torch refuses lone surrogates
        except RuntimeError:  # the store's host is gone: this rank's own error says more
            self._is_lost = True

    def _posted(self, what: str, rank: int) -> str:
        """Returns the text that a rank has posted; empty if it posted none or withdrew it."""
        key = f"lightrl/{what}/{rank}"
        return self._store.get(key).decode() if self._has(key) else ""

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:  # the store's host is gone too
            self._is_lost = True
            return False


def _where(phase: str) -> str:
    return phase if phase == _BETWEEN else f"in phase {phase!r}"


def describe(error: BaseException) -> str:
    """Returns the error with its traceback; the middle of a very long text is left out.

    A last line names the user's function, if any, whose result lightrl could not use.
    """
    text = "".join([*traceback.format_exception(error), called_own_code(error)])
    left_out = len(text) - 2 * _LONGEST_END
    if left_out <= 0:
        return text
    return f"{text[:_LONGEST_END]}\n... ({left_out:,} characters left out) ...\n{text[-_LONGEST_END:]}"


def _is_leaving() -> bool:
    """Returns whether this thread is in an except or finally block of a posted error, or of one that followed it."""
    found: list[BaseException | None] = [sys.exc_info()[1]]
    for error in found:  # grows
        if error is None:
            continue
        if _POSTED in error.__dict__:
            return True
        behind = (error.__cause__, error.__context__, *getattr(error, "exceptions", ()))
        found += [other for other in behind if other not in found]
    return False
