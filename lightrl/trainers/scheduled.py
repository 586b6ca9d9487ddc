"""Runs in which a step leaves unfinished prompts to the next one (--rollout.over_issue, --rollout.filter)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightrl.algorithms.losses import mismatch_statistics
from lightrl.config import RolloutConfig
from lightrl.imports import load_object, place_of, require_call
from lightrl.metrics import Statistics
from lightrl.records import Experience, PackedBatch, ScoredGroup, Status
from lightrl.rollout.late_drop import DroppingScheduler, LateDropCollector
from lightrl.rollout.patient_driver import driver_of
from lightrl.rollout.schedule import Schedule
from lightrl.rollout.scheduled_collector import Filter, Pace, ScheduledCollector, scheduled_collector
from lightrl.rollout.scheduler import AsyncScheduler, Rules, Scheduler, SyncScheduler
from lightrl.trainers.fit import Trainer
from lightrl.trainers.policy_step import Batch, PolicyUpdates
from lightrl.trainers.reward_components import keeper_of
from lightrl.trainers.run import RunContext
from lightrl.trainers.variants import variant

SCHEDULERS = {"wait": AsyncScheduler, "drop": DroppingScheduler}  # keys: values of --rollout.late
COLLECTORS = {"wait": ScheduledCollector, "drop": LateDropCollector}
BUILTIN_FILTERS = {"unequal_rewards": "lightrl.trainers.scheduled:unequal_rewards"}


def unequal_rewards(group: ScoredGroup) -> bool:
    """Keeps groups whose rewards differ, since other groups teach nothing (DAPO, arXiv:2503.14476)."""
    return group.has_signal


def scheduled(trainer_class: Callable[[Any], Trainer]) -> Callable[[Any], Trainer]:
    """Returns the trainer class of a scheduled run, made from an ordinary trainer class."""
    return variant(trainer_class, ScheduledTrainer, name="Scheduled", option="A schedule (--rollout.over_issue ...)")


class ScheduledTrainer(Trainer):
    """Mixin for a trainer's class that takes its batches from a schedule, which checkpoints include."""

    made_by = "lightrl.trainers.scheduled:scheduled"
    collector: ScheduledCollector
    schedule: Schedule
    prompts: Any
    rewards: Any

    def __init__(self, run: RunContext | RolloutConfig, **parts: Any) -> None:
        config: RolloutConfig = run.config if isinstance(run, RunContext) else run
        check_schedule(config)
        keep = self.filter_of(config)
        super().__init__(run, **parts)
        options = config.rollout
        pace = Pace(
            agree_every=options.agree_every,
            partial=options.partial,
            keep=keep,
            keeps_cache=options.keep_cache,
            driver=driver_of(options),
        )
        self.collector = scheduled_collector(
            self.run.workflow,
            self.strategy,
            self.rewards,
            self.schedule,
            pace,
            self.statistics,
            config,
            kind=COLLECTORS[config.rollout.late],
        )
        self.collector.keeper = keeper_of(config, self.rewards)
        self.updates = YoungUpdates(self.run, self.statistics)

    def filter_of(self, config: RolloutConfig) -> Filter | None:
        """Returns the run's filter of groups."""
        return load_filter(config)

    def resume(self) -> None:
        """Resumes the run and begins the schedule, or continues a checkpoint's."""
        comm, size = self.strategy.comm, self.strategy.serving.group.size
        scheduler = scheduler_of(self.config)
        self.schedule = Schedule(scheduler, comm, self.prompts.train, self.prompts.sampler.index_at, engine_size=size)
        self.saved["schedule"] = self.schedule
        super().resume()

    def close(self) -> None:
        """Ends the unfinished episodes, and then the run."""
        self.collector.close()
        super().close()


class YoungUpdates(PolicyUpdates):
    """Leaves out tokens older than --rollout.max_token_staleness; a sample with no other tokens has expired."""

    def __init__(self, run: RunContext, statistics: Statistics) -> None:
        super().__init__(run, statistics)
        self._max_age: int = run.config.rollout.max_token_staleness
        self._keeps_cache: bool = run.config.rollout.keep_cache
        self._step = 0

    def experience(self, groups: Sequence[ScoredGroup], step: int) -> list[Experience]:
        """Returns the samples with their rewards; their old tokens count in no statistic of trained tokens either."""
        oldest = max(0, step - self._max_age) if self._max_age else 0
        return [replace(item, min_version=oldest) for item in super().experience(groups, step)]

    def deal(self, experience: list[Experience], step: int) -> Batch:
        """Counts old tokens and expired samples, and distributes the samples over updates and ranks."""
        self._step = step
        return super().deal([self._counted(item) for item in experience], step)

    def measure_mismatch(self, logprobs: Tensor, batch: PackedBatch) -> None:
        """Compares engine and trainer; with --rollout.keep_cache, also for tokens that read old keys and values.

        Those are the tokens of the newest weights in samples that older weights began.
        """
        super().measure_mismatch(logprobs, batch)
        if not self._keeps_cache or batch.versions is None:
            return
        mask = batch.loss_mask & ~self._is_fresh(batch) & (batch.versions == self._step)
        result = mismatch_statistics(logprobs.detach(), batch.sampler_logprobs, mask)
        if count := float(result["count"]):
            self._statistics.maximum("mismatch/carried_max_abs", float(result["max_abs"]))
            self._statistics.mean("mismatch/carried_mean_abs", float(result["sum_abs"]), count)

    def _counted(self, item: Experience) -> Experience:
        """Counts the tokens that are too old; a sample of only such tokens gets the status expired."""
        num_young = replace(item, is_trained=True).trained_tokens.count(True)
        if num_young == item.sample.num_own:
            return item
        self._statistics.add("rollout/tokens_too_old", item.sample.num_own - num_young)
        if num_young:
            return item
        self._statistics.add("rollout/expired", 1)
        return replace(item, is_trained=False, sample=item.sample.to(Status.EXPIRED))


def scheduler_of(config: RolloutConfig) -> Scheduler:
    """Returns the scheduler that the options ask for."""
    options = config.rollout
    rules = Rules(
        batch_size=config.num_prompts,
        max_staleness=options.max_staleness,
        over_issue=options.over_issue,
        max_groups=options.max_groups,
        tail_batch=options.tail_batch,
        tail_after=options.tail_after,
        on_policy_min_ratio=options.on_policy_min_ratio,
    )
    return SCHEDULERS[options.late](rules) if options.over_issue else SyncScheduler(rules)


def load_filter(config: RolloutConfig) -> Filter | None:
    """Returns the function that --rollout.filter names; raises ValueError if it does not exist."""
    if not config.rollout.filter:
        return None
    name = config.rollout.filter
    found = load_object(name, builtin=BUILTIN_FILTERS, what="filter", example="my_filter")
    if not callable(found):
        raise ValueError(f"--rollout.filter {name}: this is no function of a scored group.")
    if name in BUILTIN_FILTERS:
        keep: Filter = found
        return keep
    require_call(f"--rollout.filter {name}", found, "group")

    def kept(group: ScoredGroup) -> bool:
        answer = found(group)
        if answer is None or inspect.isawaitable(answer):
            raise ValueError(
                f"--rollout.filter {name} returned {answer!r}{place_of(found)}. It must return whether the group may "
                "be trained, True or False, and must not be async."
            )
        return bool(answer)

    return kept


def check_schedule(config: RolloutConfig) -> None:
    """Raises ValueError for options that a scheduled run does not support."""
    if getattr(getattr(config, "dynamic_sampling", None), "enabled", False):
        raise ValueError(
            "--dynamic_sampling.enabled does not go with a schedule, nor with --data.curriculum without "
            "--rollout_ranks: use --rollout.filter unequal_rewards, which replaces groups of equal rewards too."
        )
