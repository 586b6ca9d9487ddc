"""Runs in which some ranks train and others generate (--rollout_ranks): the roles of ranks, and what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeGuard

from lightrl.algorithms.registry import AdvantageTraits, find, traits_of
from lightrl.comm import RankError
from lightrl.config import GRPOConfig, RolloutConfig, check_own_options
from lightrl.config.rollout_sections import ScheduleConfig
from lightrl.engines.link import SIGNAL, Link
from lightrl.engines.peer_watch import PeerWatch
from lightrl.rewards.apart import leave_to_others, needs_all_ranks
from lightrl.rewards.reward_set import RewardSet
from lightrl.roles import Role, split
from lightrl.rollout.bounded_collector import BoundedCollector, Tickets
from lightrl.rollout.bounded_drop import DroppingCollector
from lightrl.rollout.bounded_filter import NamingCollector, filtering
from lightrl.rollout.recorded_schedule import ScheduleLog
from lightrl.rollout.remote_collector import GreedyRemoteCollector, RemoteCollector
from lightrl.rollout.scheduled_collector import Filter
from lightrl.strategy import StrategyBase, create_strategy, strategy_class
from lightrl.strategy.serving.remote_serving import RemoteServing
from lightrl.trainers.curriculum import CurriculumTrainer, load_curriculum
from lightrl.trainers.fit import Trainer
from lightrl.trainers.rollout_server import RolloutServer
from lightrl.trainers.scheduled import YoungUpdates, load_filter
from lightrl.trainers.variants import variant

BOUNDED_COLLECTORS = {"wait": BoundedCollector, "drop": DroppingCollector}  # keys: values of --rollout.late
# Options of --rollout that such runs support.
_BOUNDED = ("max_staleness", "late", "on_policy_min_ratio", "max_token_staleness", "filter", "max_groups")


def in_role(trainer_class: Callable[[Any], Trainer]) -> Callable[[RolloutConfig], Trainer | RolloutServer]:
    """Returns the builder of this rank's part of the run: a trainer of that class, or a server of samples."""

    def build(config: RolloutConfig) -> Trainer | RolloutServer:
        check_split(config)
        parts = curriculum_of(config)
        role = split(config.rollout_ranks, engine_tp_size=config.engine_tp_size)
        if not role.is_trainer:
            return RolloutServer(config, role, rewards_of_samples(config))
        made: Trainer = variant(trainer_class, Learner, *parts, name="Remote", option="--rollout_ranks")(config, role)
        return made

    return build


def curriculum_of(config: RolloutConfig) -> tuple[type[Trainer], ...]:
    """Returns the mixins for --data.curriculum; raises ValueError if there is no such curriculum."""
    if not config.data.curriculum:
        return ()
    load_curriculum(config.data.curriculum)  # checked here, because this runs on the rollout ranks too
    return (CurriculumTrainer,)


class Learner(Trainer):
    """Mixin for a trainer's class that gets samples from the rollout ranks and sends them the weights."""

    made_by = "lightrl.trainers.separate:in_role"
    collector: RemoteCollector
    prompts: Any  # the trainer's PromptData
    rewards: RewardSet
    updates: Any  # of the trainer

    def __init__(self, config: RolloutConfig, role: Role) -> None:
        self._link: Link | None = None
        self._peers: PeerWatch | None = None
        self._role = role
        try:
            super().__init__(config, strategy=self._make_strategy(config))
            self.collector = self._make_collector()
            if config.rollout.max_token_staleness:
                self.updates = YoungUpdates(self.run, self.statistics)
        except Exception as error:
            self._report(error)
            raise

    def resume(self) -> None:
        """Reads the checkpoint, which holds the used tickets if production never stops."""
        leave_to_others(self.rewards)  # here, because the trainer prepares its rewards next
        self._tickets = Tickets(self.strategy.comm)
        if self.config.rollout.max_staleness:
            self.saved["tickets"] = self._tickets
        super().resume()

    def _make_collector(self) -> RemoteCollector:
        comm, link, prompts, tickets = self.strategy.comm, self._link, self.prompts, self._tickets
        plain = GreedyRemoteCollector if _needs_greedy(self.config) else RemoteCollector
        made = plain(comm, link, prompts.train, prompts.sampler)
        if self.config.rollout.max_staleness:
            log = ScheduleLog(self.folder.root)
            kind = BOUNDED_COLLECTORS[self.config.rollout.late]
            if (keep := load_filter(self.config)) is not None:
                kind = self._filtering(kind, keep)
            made = kind(
                comm,
                link,
                prompts.train,
                prompts.sampler,
                config=self.config,
                tickets=tickets,
                log=log,
                first_step=self.step_index,
            )
        if link is not None:
            known = {"first": tickets.first, "used": sorted(tickets.beyond), "begun": tickets.begun}
            link.post({"do": "begin", "folder": str(self.folder.root), "step": self.step_index, **known})
        return made

    def _filtering(self, kind: type[BoundedCollector], keep: Filter) -> type[BoundedCollector]:
        """Returns the kind of collector with the filter, of whose rejections a curriculum learns, too."""
        if isinstance(self, CurriculumTrainer):
            return filtering(kind, self.noting(keep), by=NamingCollector)
        return filtering(kind, keep)

    def fit(self) -> dict[str, float]:
        """Trains to max_steps; reports an error to the rollout ranks."""
        try:
            return super().fit()
        except Exception as error:
            explained = self._explained(error)
            self._report(explained)
            if explained is error:
                raise
            raise explained from error

    def close(self) -> None:
        """Ends the rollout ranks, then this one."""
        if self._link is not None:
            self._link.post({"do": "stop"})
        if self._peers is not None:
            self._peers.end()
        super().close()

    def _report(self, error: Exception) -> None:
        if self._link is not None:
            self._link.peers.report(error)

    def _explained(self, error: Exception) -> Exception:
        """Returns an error that says which rank is gone, if a collective broke for that reason."""
        if self._peers is None or not isinstance(error, RuntimeError):
            return error
        failure = self._peers.failure_soon()
        return RankError(f"{failure}\n{error}") if failure and failure not in str(error) else error

    def _hear_signal(self) -> None:
        """Acts on a signal that only a rollout rank has received, as if this rank had received it."""
        link = self._link
        assert link is not None, "it alone calls this"
        if link.has(SIGNAL):
            signum = int(link.take(SIGNAL))
            if signal.getsignal(signum) is not signal.SIG_DFL:  # otherwise nothing is being trained
                os.kill(os.getpid(), signum)

    def _make_strategy(self, config: RolloutConfig) -> StrategyBase:
        """Creates the trainer's strategy, which has no engine of its own."""
        options = replace(config, engine_tp_size=1, engine_sleep_level=0, canary_every=0)
        strategy = create_strategy(options)
        strategy.serving = RemoteServing(strategy, options, lambda: self._connect(strategy))
        return strategy

    def _connect(self, strategy: StrategyBase) -> Link | None:
        """Creates the trainer's end of the link, on its first rank."""
        if not strategy.comm.is_main:
            self._peers = PeerWatch(self._role)
            self._peers.begin()
            return None
        self._link = Link(self._role, strategy.device, strategy.comm.timeout)
        self._peers = self._link.peers
        strategy.comm.failure_of_others = self._peers.failure
        self._link.on_look = self._hear_signal
        self._link.meet()
        return self._link


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_split(config: RolloutConfig) -> None:
    """Raises ValueError for an option that separate ranks do not support."""
    _check_schedule(config)
    _check_filters(config)
    _check_engine(config)
    check_own_options(config, strategy_class(config.strategy))  # here, as rollout ranks create another strategy
    if config.offload_while_generating:
        raise _refused("--offload_while_generating, since no engine shares the trainer's device", "Leave it out")
    if _needs_greedy(config) and (ahead := config.rollout.max_staleness):
        text = f"--algorithm.advantage {config.algorithm.advantage} and --rollout.max_staleness {ahead}"
        remedy = "Give --rollout.workflow remax --algorithm.advantage reinforce, which subtracts the same baseline"
        raise _refused(text, remedy)


def rewards_of_samples(config: RolloutConfig) -> RewardSet:
    """Builds the rewards of a rank that generates; raises ValueError for one that all ranks compute together."""
    rewards = RewardSet.from_config(config)
    if (label := needs_all_ranks(rewards)) is not None:
        raise _refused(f"--reward {label}, which all ranks compute together", "Choose another reward")
    return rewards


def _needs_greedy(config: RolloutConfig) -> TypeGuard[GRPOConfig]:
    """Returns whether the estimator compares samples with greedy responses."""
    if not isinstance(config, GRPOConfig):
        return False
    return "greedy_baseline" in traits_of(find("advantage", config.algorithm.advantage), AdvantageTraits).needs


def _check_schedule(config: RolloutConfig) -> None:
    """Raises ValueError for a schedule's option that needs ranks that do both; options about age work for either."""
    defaults = ScheduleConfig()
    for name in (item.name for item in fields(defaults) if item.name not in _BOUNDED):
        if getattr(config.rollout, name) != getattr(defaults, name):
            raise _refused(f"--rollout.{name}", "Leave it out")


def _check_filters(config: RolloutConfig) -> None:
    """Raises ValueError for a way to replace groups that the run does not support or that does not exist."""
    ahead, sampling = config.rollout.max_staleness, getattr(config, "dynamic_sampling", None)
    if sampling is not None and sampling.enabled and ahead:
        text = f"--dynamic_sampling.enabled and --rollout.max_staleness {ahead}"
        raise _refused(text, "Give --rollout.filter unequal_rewards instead of --dynamic_sampling.enabled")
    if load_filter(config) is None:
        return
    if not ahead:
        text = "--rollout.filter and --rollout.max_staleness 0"
        raise _refused(text, "Give --dynamic_sampling.enabled True instead (GRPO), or --rollout.max_staleness 1")


def _check_engine(config: RolloutConfig) -> None:
    """Raises ValueError for options of an engine beside the trainer that differ from their defaults."""
    remedies = {
        "canary_every": "the fingerprints prove each sync, and mismatch/* compares logprobs",
        "engine_sleep_level": "the engine has its device for itself and never sleeps",
    }
    for item in fields(config):
        asked = getattr(config, item.name) if item.name in remedies else 0
        if asked not in (0, item.default):
            raise _refused(f"--{item.name} {asked}: {remedies[item.name]}", "Leave it out")


def _refused(what: str, remedy: str) -> ValueError:
    return ValueError(f"--rollout_ranks does not go with {what}. {remedy}, or use --rollout_ranks 0.")
