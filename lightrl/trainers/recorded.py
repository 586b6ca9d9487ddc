"""Runs that record their rollouts (--rollout.record), or learn from a record without an engine (--rollout.from)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightrl.config import RolloutConfig
from lightrl.records import Experience, ScoredGroup
from lightrl.rollout.record import num_steps, read_groups, write_groups
from lightrl.trainers.fit import StepReport, Trainer
from lightrl.trainers.policy_step import describe_rollout
from lightrl.trainers.reward_components import count_equal_components
from lightrl.trainers.run import RunContext
from lightrl.trainers.staleness import older_samples
from lightrl.trainers.variants import variant
from lightrl.wording import counted


def recorded(trainer_class: type[Trainer]) -> Callable[[RolloutConfig], Trainer]:
    """Returns the builder of a trainer that writes or reads a record, made from an ordinary trainer class."""

    def build(config: RolloutConfig) -> Trainer:
        if not hasattr(trainer_class, "learn_from"):
            raise ValueError(
                "--rollout.record and --rollout.from need a trainer that has learn_from(groups), as those of GRPO and "
                "PPO have it."
            )
        mixin = ReplayTrainer if config.rollout.from_ else RecordingTrainer
        name = "Replaying" if config.rollout.from_ else "Recording"
        made = variant(trainer_class, mixin, name=name, option="A record (--rollout.record, --rollout.from)")
        trainer: Trainer = made(config)
        return trainer

    return build


class RecordingTrainer(Trainer):
    """Mixin for a trainer's class that writes each step's groups before it learns from them."""

    made_by = "lightrl.trainers.recorded:recorded"

    def learn_from(self, groups: Sequence[ScoredGroup]) -> list[Experience]:
        """Writes the groups, and learns from them unless --rollout.record_only is set."""
        options, comm = self.config.rollout, self.strategy.comm
        kept = [_of_first_weights(group) for group in groups] if options.record_only else groups
        with comm.phase("recording", local=True):
            write_groups(Path(options.record), self.step_index, kept, rank=comm.rank, world=comm.world)
        if options.record_only:
            return []
        experience: list[Experience] = super().learn_from(groups)  # type: ignore[misc]
        return experience


def _of_first_weights(group: ScoredGroup) -> ScoredGroup:
    """Returns the group with version 0 for all tokens: in a run that only records, no step changes the weights."""
    samples = tuple(replace(sample, versions=(0,) * len(sample.versions)) for sample in group.samples)
    return replace(group, samples=samples)


class ReplayTrainer(Trainer):
    """Mixin for a trainer's class that takes its groups from a record."""

    made_by = "lightrl.trainers.recorded:recorded"

    def __init__(self, run: RunContext | RolloutConfig, **parts: Any) -> None:
        config: RolloutConfig = run.config if isinstance(run, RunContext) else run
        _check_record(config)
        super().__init__(run, **parts)

    def step(self) -> StepReport:
        """Learns from the groups that were recorded in this step."""
        return learn_from_record(self, Path(self.config.rollout.from_))

    def evaluate(self) -> dict[str, float]:
        """Returns no metrics, since nothing can be sampled without an engine."""
        return {}


def learn_from_record(trainer: Any, record: Path, *, has_whole_rollout: bool = True) -> StepReport:
    """Learns once from the groups that a record holds for the trainer's step.

    has_whole_rollout: whether these are all groups that were sampled, so that they can describe the rollout.
    """
    comm, step = trainer.strategy.comm, trainer.step_index
    with comm.phase("reading the record", local=True):
        groups = read_groups(record, step, trainer.prompts.train, rank=comm.rank, world=comm.world)
    samples = [sample for group in groups for sample in group.samples]
    if has_whole_rollout:
        describe_rollout(samples, [reward for group in groups for reward in group.rewards], trainer.statistics)
        count_equal_components(groups, trainer.statistics)
    items = [Experience(sample=sample, reward=0.0, advantage=0.0) for sample in samples]
    trainer.updates.stale = older_samples(items, step, comm)
    experience = trainer.learn_from(groups)
    trainer.strategy.set_global_step(step + 1)
    report: StepReport = trainer.report(experience)
    return report


def _check_record(config: RolloutConfig) -> None:
    record = Path(config.rollout.from_)
    count = num_steps(record)
    if not count:
        raise ValueError(f"--rollout.from {record} holds no record: give the folder that --rollout.record wrote.")
    if config.max_steps > count:
        raise ValueError(
            f"--rollout.from {record} holds {counted(count, 'step')}, and --max_steps is {config.max_steps}: "
            f"give at most {count}."
        )
