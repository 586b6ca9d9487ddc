"""What looks on while a trainer trains: an Observer, whose methods are the moments of a run.

An observer changes nothing that is computed. What does is a step of the trainer that a subclass overrides, such as
GRPOTrainer.make_groups().
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightrl.records import Experience, PackedBatch, ScoredGroup, StateValues, TokenScores


class Observer:
    """Is told of the moments of a run, in the order of the methods, once it is among a trainer's observers.

    A subclass overrides the moments that it needs. All ranks are told alike, so that it may call collectives, except
    where a method says otherwise. Of several observers, the first in the list hears of a moment first.
    """

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Surrounds a step, which counts from 1; a step that fails raises at the yield. Calls after_step()."""
        yield
        self.after_step(step)

    def after_rollouts(self, groups: Sequence[ScoredGroup]) -> None:
        """Hears of this rank's scored groups, from which the trainer learns next."""

    def after_forward(self, scores: TokenScores | StateValues, batch: PackedBatch) -> None:
        """Hears of the scores of a micro-batch that is trained, before their loss; no collective, it is a busy place.

        Of each update there are as many as micro-batches, first those of a critic, if it is a model of its own.
        """

    def after_step(self, step: int) -> None:
        """Hears that a step is done; trainer.step_index is its number by now. What it takes counts in time/step."""

    def sample_columns(self, item: Experience) -> Mapping[str, Any]:
        """Returns what to add to a sample's line in samples.jsonl; rank 0 alone asks, for the logged samples."""
        return {}

    def after_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hears of the numbers of a step over all ranks, once metrics.jsonl has them; 0 is before any training."""

    def after_export(self, folder: Path) -> None:
        """Hears that the models were written to a folder for their users, during the run or at its end."""

    def close(self) -> None:
        """Ends with the trainer, also after a signal; not after an error."""
