"""Observer: looks on while a trainer trains; its methods are called at the moments of a run.

An observer changes nothing that is computed. To change that, override a method of the trainer in a subclass, such as
GRPOTrainer.make_groups().
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightrl.records import Experience, PackedBatch, ScoredGroup, StateValues, TokenScores


class Observer:
    """Base class of what a trainer tells about the moments of a run, here in order, once it is in `observers`.

    A subclass overrides the moments that it needs. All ranks call an observer alike, so it may use collectives, except
    where a method says otherwise. Observers are called in the order of the list.
    """

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Surrounds a step, which counts from 1; a step that fails raises at the yield. Calls after_step()."""
        yield
        self.after_step(step)

    def after_rollouts(self, groups: Sequence[ScoredGroup]) -> None:
        """Receives this rank's scored groups, from which the trainer learns next."""

    def after_forward(self, scores: TokenScores | StateValues, batch: PackedBatch) -> None:
        """Receives the scores of each trained micro-batch before the loss; it must be fast and use no collective.

        An update calls it once per micro-batch, first for those of a critic, if the critic is a model of its own.
        """

    def after_step(self, step: int) -> None:
        """Follows a step, whose number trainer.step_index now is. The time it takes counts in time/step."""

    def sample_columns(self, item: Experience) -> Mapping[str, Any]:
        """Returns entries for a sample's line in samples.jsonl; only rank 0 calls it, for the logged samples."""
        return {}

    def after_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives the metrics of a step over all ranks, once metrics.jsonl has them; step 0 is before any training."""

    def after_export(self, folder: Path) -> None:
        """Follows an export of the models to a folder, during the run or at its end."""

    def after_failure(self, error: BaseException) -> None:
        """Follows an error, a signal or Ctrl-C that ends the program, on a rank that has it; it has a few seconds.

        It must use no collective. After a signal, close() follows; otherwise the process ends.
        """

    def close(self) -> None:
        """Cleans up when the trainer ends, even after a signal, but not after an error."""
