"""What a run does about steps whose metrics are bad: it warns, and stops after too many of them.

The metrics are the same on every rank, so all ranks decide alike. A run whose steps are good enters nothing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightrl.comm import RankError
from lightrl.metrics import findings
from lightrl.records import ScoredGroup
from lightrl.rollout.record import write_groups

logger = logging.getLogger(__name__)

_PASSED_STEPS = 10  # without a warning, before the same one is news again


class UnhealthyRunError(RankError):
    """Too many steps in a row were bad."""


# ---- Reactions -------------------------------------------------------------------------------------------------------


class BadSteps:
    """Warns of what is bad about the steps of a run, of each kind when it begins, and stops the run."""

    def __init__(self, trainer: Any) -> None:
        self.count = 0  # in a row
        self._trainer = trainer
        self._found: Mapping[str, str] = {}  # in the last step
        self._last_seen: dict[str, int] = {}  # step of each kind
        self._groups: Sequence[ScoredGroup] = ()  # of the last step, if the run may stop

    def see(self, metrics: Mapping[str, float]) -> None:
        """Looks at a finished step; raises UnhealthyRunError on every rank after the last bad one that is allowed."""
        limits = self._trainer.config.health
        self._found = findings(metrics, limits)
        if self._found:
            self._warn()
        if limits.max_bad_steps:
            self._count(limits.max_bad_steps)

    def _warn(self) -> None:
        step = self._trainer.step_index
        for name in sorted(self._found):
            seen, self._last_seen[name] = self._last_seen.get(name), step
            is_new = seen is None or step - seen > _PASSED_STEPS
            if is_new and self._trainer.strategy.comm.is_main:
                logger.warning("Step %d: %s", step, _capital(self._found[name]))

    def _count(self, allowed: int) -> None:
        self.count = self.count + 1 if self._found else 0
        if self._trainer.strategy.comm.any(self.count >= allowed):
            self._stop()

    def keep_batches(self) -> None:
        """Keeps the groups that the trainer learns from, for the last batch of a run that stops."""
        learn_from = self._trainer.learn_from

        def keep_and_learn_from(groups: Sequence[ScoredGroup]) -> Any:
            self._groups = groups
            return learn_from(groups)

        self._trainer.learn_from = keep_and_learn_from

    def _stop(self) -> NoReturn:
        comm, root, step = self._trainer.strategy.comm, self._trainer.folder.root, self._trainer.step_index
        replay = ""
        if hasattr(self._trainer, "learn_from"):
            with comm.phase("writing the batch", local=True):
                write_groups(batches_of(root), step - 1, self._groups, rank=comm.rank, world=comm.world)
            replay = f" Its batch is in {batches_of(root)}: `lightrl replay {root} --step {step}` repeats it."
        reasons = " ".join(_capital(text) for _, text in sorted(self._found.items()))
        told = f"{self.count} bad steps in a row, as many as --health.max_bad_steps allows. Step {step}: {reasons}"
        raise UnhealthyRunError(told + replay if comm.is_main else "the run was stopped; rank 0 says why")


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def batches_of(run: Path) -> Path:
    """Returns the folder of a run that has the batches of steps after which it stopped."""
    return run / "bad_batches"


def keep_batches(trainer: Any) -> None:
    """Has the trainer keep each batch, so that one after which the run stops can be written."""
    if hasattr(trainer, "learn_from"):
        trainer.bad_steps.keep_batches()
