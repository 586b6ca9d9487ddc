"""The options of recording rollouts, and of training from a record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class RecordConfig:
    """The folder that keeps rollouts, or the one that they come from in place of an engine."""

    __slots__ = ()

    record: str = ""
    """Folder that gets the scored groups of every step, as JSON lines and safetensors. Empty: none are kept."""
    record_only: bool = False
    """Sample and score, and learn nothing. The weights stay those of the start."""
    from_: str = ""
    """Folder of such a record to learn from, given as --rollout.from. The run has no engine and does not evaluate."""

    @property
    def is_recorded(self) -> bool:
        """Whether the run writes or reads a record."""
        return bool(self.record or self.from_)

    def check(self) -> None:
        """Raises ValueError for options that do nothing or contradict each other."""
        if self.record_only and not self.record:
            raise ValueError("--rollout.record_only samples for a record: give its folder by --rollout.record.")
        if self.record and self.from_:
            raise ValueError(
                "--rollout.from reads a record, so that there is nothing to write: leave --rollout.record out."
            )

    def check_record(self, *, has_own_ranks: bool) -> None:
        """Raises ValueError for a record of rollouts that do not begin and end in a step of the training ranks."""
        if self.is_recorded and has_own_ranks:
            raise ValueError(
                "--rollout.record and --rollout.from take rollouts that begin and end in a step: leave --rollout_ranks "
                "and the options out that carry samples from step to step."
            )
