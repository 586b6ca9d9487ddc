"""Samples by a schedule: more prompts than a batch are under way, and unfinished ones continue in the next step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightrl.config import RolloutConfig
from lightrl.engines.base import EngineGroup, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.metrics import Statistics
from lightrl.records import Sample, ScoredGroup, Status
from lightrl.rewards.components import ComponentKeeper
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.client import EngineClient
from lightrl.rollout.collector import Prompts, sampling_of, seed_of_prompt
from lightrl.rollout.episode import Episode
from lightrl.rollout.episode_collector import (
    EpisodeCollector,
    EpisodeFailure,
    EpisodeJob,
    describe_episodes,
    episode_limits,
)
from lightrl.rollout.journal import Journal
from lightrl.rollout.phases import PhasedDriver
from lightrl.rollout.schedule import Schedule
from lightrl.rollout.workflow import Workflow
from lightrl.strategy import StrategyBase

logger = logging.getLogger(__name__)

Filter = Callable[[ScoredGroup], bool]


class SingleTurn(Workflow):
    """The workflow that makes one response to the prompt."""

    async def arun_episode(self, engine: EngineClient, data: Any) -> Episode:
        """Makes an episode of a single turn."""
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids))
        return episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a scheduled run proceeds."""

    agree_every: int = 16  # engine steps between two agreements of all ranks
    partial: bool = True  # False: a sample that is not finished within a step starts over from its prompt
    keep: Filter | None = None  # rejects a scored group by returning False
    keeps_cache: bool = False  # whether samples that continue keep their keys and values
    driver: Callable[[ColocatedEngine, EngineGroup], PhasedDriver] = PhasedDriver


class ScheduledCollector(EpisodeCollector):
    """Returns at each step the batch that the schedule chooses. Every rank calls each method."""

    completes_groups = True
    keeper: ComponentKeeper | None = None  # for an estimator that needs each reward by itself

    def __init__(
        self,
        strategy: StrategyBase,
        rewards: RewardSet,
        workflow: Workflow,
        schedule: Schedule,
        pace: Pace,
        statistics: Statistics,
        **episodes: Any,
    ) -> None:
        """Takes the parts of a scheduled run; `episodes` are the other arguments of EpisodeCollector."""
        super().__init__(strategy, rewards, workflow, **episodes)
        self.schedule = schedule
        self._pace = pace
        self._statistics = statistics
        self._driver: PhasedDriver | None = None
        self._ended: dict[tuple[int, int], Sample] = {}  # of unfinished groups
        self._unscored: dict[int, list[Sample]] = {}  # of finished groups, by ticket
        self._taken: list[ScoredGroup] | None = None  # the batch, until it has been scored
        self._num_lost = 0  # groups of the step without any completed sample, over all ranks

    def sample(self, prompts: Prompts, *, step: int, group_size: int, temperature: float) -> list[Sample]:
        """Returns this rank's samples of the step's batch. The schedule chooses the prompts and ignores those given."""
        serving = self._strategy.serving
        with serving.session() as engine:
            if self._driver is None or self._driver.engine is not engine:
                self._driver = self._pace.driver(engine, serving.group)
            first = self._driver.num_steps
            batch = self._roll_out(self._driver, step, group_size, replace(self._sampling, temperature=temperature))
            self._statistics.maximum("rollout/engine_steps", self._driver.num_steps - first)
            with self._comm.phase("episodes", local=True):
                self._pause(self._driver)
        groups = self.schedule.buffer.take(batch)
        self.schedule.scheduler.take(batch)
        self._describe_step(step)
        positions = {ticket: position for position, ticket in enumerate(batch)}
        self._taken = [group.at(positions[group.ticket]) for group in groups]
        return [sample for group in self._taken for sample in group.samples]

    def score(
        self, samples: Sequence[Sample], statistics: Statistics | None = None, *, prefix: str = ""
    ) -> list[float]:
        """Returns the rewards of the batch, which is scored already; scores any other samples."""
        if self._taken is None:
            return super().score(samples, statistics, prefix=prefix)
        taken, self._taken = self._taken, None
        return [reward for group in taken for reward in group.rewards]

    def sample_greedily(self, prompts: Prompts) -> list[Sample]:
        """Generates the greedy response to each prompt of the batch; the given prompts are ignored."""
        taken, self._taken = self._taken or [], None
        own = [(group.samples[0].position, group.samples[0].prompt) for group in taken]
        samples = super().sample_greedily(own)
        self._taken = taken
        return samples

    def close(self) -> None:
        """Ends the unfinished episodes."""
        if self._driver is not None:
            self._driver.close()

    # ---- A step ------------------------------------------------------------------------------------------------

    def _roll_out(self, driver: PhasedDriver, step: int, group_size: int, sampling: SamplingParams) -> tuple[int, ...]:
        """Generates until there is a batch, and returns its tickets."""
        scheduler = self.schedule.scheduler
        has_rejected = False  # the filter may leave a step without a group; failures alone may not
        while True:
            self.schedule.open(scheduler.start(step), group_size, step)
            batch = scheduler.batch(step)
            if batch is not None:
                self._score_finished(step)
                rejected = self._rejected(batch)
                if not rejected:
                    if not batch and not has_rejected:
                        raise RuntimeError(
                            "Every episode of the step has failed or was rejected; the log has the first failure."
                        )
                    return batch
                has_rejected = True
                scheduler.lose(rejected)
                self.schedule.buffer.take(rejected)
                continue
            self._generate_some(driver, step, group_size, sampling)

    def _generate_some(self, driver: PhasedDriver, step: int, group_size: int, sampling: SamplingParams) -> None:
        """Steps the engine a few times, and tells the schedulers of all ranks which groups are finished."""
        scheduler = self.schedule.scheduler
        with self._comm.phase("episodes", local=True):
            self._begin(driver, sampling)
            driver.step(self._pace.agree_every, scheduler.may_run(step))
            mine = self._take_ended(driver, group_size)
        facts = self._comm.all_gather_object(mine)
        scheduler.finish(sorted(ticket for done, _ in facts for ticket in done))
        scheduler.lose(lost := sorted(ticket for _, gone in facts for ticket in gone))
        self._num_lost += len(lost)

    def _begin(self, driver: PhasedDriver, sampling: SamplingParams) -> None:
        """Starts the code of those of this rank's episodes that are not running, in the order of their tickets."""
        for key, journal in self.schedule.journals.items():
            if key not in driver.under_way and key not in self._ended:
                job = self._job(journal, sampling)
                driver.begin(journal, partial(self.play, driver, job))

    def _job(self, journal: Journal, sampling: SamplingParams) -> EpisodeJob:
        step, position = divmod(journal.ticket, self.schedule.scheduler.rules.batch_size)
        seed = seed_of_prompt(self._seed, step, position)  # the same draws as in a run that is not scheduled
        siblings = sum(key[0] == journal.ticket and key not in self._ended for key in self.schedule.journals)
        prompt = self.schedule.prompt(journal.ticket)
        return EpisodeJob(journal.ticket, prompt, journal.sample_index, seed, sampling, siblings)

    def _take_ended(self, driver: PhasedDriver, group_size: int) -> tuple[list[int], list[int]]:
        """Returns this rank's tickets whose groups are now complete, and those that have no completed sample."""
        for key, made in driver.take_ended().items():
            self._ended[key] = self._record(self.schedule.journals[key], made)
        done, lost = [], []
        for ticket in sorted({ticket for ticket, _ in self._ended}):
            keys = [(ticket, index) for index in range(group_size)]
            if not all(key in self._ended for key in keys):
                continue
            samples = [self._ended.pop(key) for key in keys]
            if any(sample.status is Status.COMPLETED for sample in samples):
                self._unscored[ticket] = samples
                done.append(ticket)
            else:
                describe_episodes(samples, self._statistics)  # nobody scores these, which counts the others
                lost.append(ticket)
        self.schedule.close([*done, *lost])
        return done, lost

    def _record(self, journal: Journal, made: Episode | EpisodeFailure | None) -> Sample:
        sample = self.as_sample(self._job(journal, self._sampling), made)
        return replace(sample, ticket=journal.ticket, start_version=journal.start_version)

    def _score_finished(self, step: int) -> None:
        """Scores the groups that were finished since the last call."""
        fresh, self._unscored = dict(sorted(self._unscored.items())), {}
        rewards = iter(super().score([item for group in fresh.values() for item in group], self._statistics))
        groups = [
            ScoredGroup(samples=tuple(group), rewards=tuple(next(rewards) for _ in group), step=step)
            for group in fresh.values()
        ]
        for group in groups if self.keeper is None else self.keeper.completed(groups):
            self.schedule.buffer.put(group)

    def _rejected(self, batch: Iterable[int]) -> list[int]:
        """Returns the tickets of the batch that the run's filter rejects, the same on every rank."""
        keep, buffer = self._pace.keep, self.schedule.buffer
        if keep is None:
            return []
        with self._comm.phase("the filter of groups", local=True):
            mine = [ticket for ticket in batch if ticket in buffer and not keep(buffer[ticket])]
        rejected = sorted(ticket for part in self._comm.all_gather_object(mine) for ticket in part)
        self._statistics.add("rollout/filtered", len(mine))
        return rejected

    def _pause(self, driver: PhasedDriver) -> None:
        """Takes unfinished samples out of the engine."""
        for key in driver.pause(keep=self._pace.partial):
            self.schedule.journals[key].forget()

    def _describe_step(self, step: int) -> None:
        scheduler, statistics = self.schedule.scheduler, self._statistics
        statistics.maximum("rollout/carried", len(scheduler.running))
        statistics.maximum("rollout/waiting", len(scheduler.finished))
        statistics.maximum("rollout/lost", self._num_lost)
        if self._pace.keeps_cache:
            kept = sum(journal.num_kept_bytes for journal in self.schedule.journals.values())
            statistics.maximum("memory/kept_gb", kept / 1e9)
        if scheduler.rules.tail_batch > 0:
            statistics.maximum("rollout/tail_batch", float(scheduler.is_tail(step)))
        self._num_lost = 0


def scheduled_collector(
    workflow: Workflow | None,
    strategy: StrategyBase,
    rewards: RewardSet,
    schedule: Schedule,
    pace: Pace,
    statistics: Statistics,
    config: RolloutConfig,
    *,
    kind: type[ScheduledCollector] = ScheduledCollector,
) -> ScheduledCollector:
    """Returns the collector of a scheduled run; without a workflow a sample is one response."""
    limits = episode_limits(config, strategy)
    return kind(
        strategy,
        rewards,
        workflow or SingleTurn(),
        schedule,
        pace,
        statistics,
        seed=config.seed,
        limits=limits,
        timeout_s=config.rollout.episode_timeout_s,
        max_groups=config.rollout.max_groups,  # of an evaluation; those of training are the scheduler's
        **sampling_of(config),
    )
