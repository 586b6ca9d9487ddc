"""RolloutServer: a rank that only generates (--rollout_ranks) and obeys trainer rank 0 over the link."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightrl.config import DeepSpeedConfig, LoraConfig, MegatronConfig, RolloutConfig
from lightrl.data.sampler import shard
from lightrl.engines.base import create_engine, create_recording_engine
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.link import SIGNAL, Command, Link
from lightrl.metrics import Statistics
from lightrl.models.lora import add_adapters
from lightrl.models.packed_attention import varies_with_length
from lightrl.models.policy import load_policy
from lightrl.records import ScoredGroup
from lightrl.rewards.apart import load_apart, share_models
from lightrl.rewards.reward_set import RewardSet
from lightrl.roles import Role
from lightrl.rollout.collector import Collector, Prompts, grouped, sampling_of
from lightrl.rollout.differing_reward import differing_reward_of
from lightrl.rollout.episode_collector import EpisodeCollector, collector_of_episodes
from lightrl.rollout.episode_production import EpisodeProduction
from lightrl.rollout.majority import add_majority
from lightrl.rollout.production import Production
from lightrl.rollout.sample_messages import to_bytes
from lightrl.rollout.saved_groups import group_state
from lightrl.strategy import StrategyBase, create_strategy, strategy_class
from lightrl.strategy.serving.adapter_source import serve_as_configured
from lightrl.strategy.torch_native import TorchStrategy
from lightrl.trainers.lifetime import SignalWatch
from lightrl.trainers.policy_step import PromptData
from lightrl.trainers.reward_components import keeper_of
from lightrl.trainers.run import RunContext, fix_for_run, open_run
from lightrl.trainers.run_folder import RunFolder


class RolloutServer:
    """Generates, scores and evaluates with the weights that the trainer sends."""

    def __init__(self, config: RolloutConfig, role: Role, rewards: RewardSet) -> None:
        options = _server_options(config, role)
        self.config = config
        self.rewards = rewards
        self.step_index = 0  # those at the start of the run
        self._has_passed_on = False  # a signal, to the trainer
        self.strategy: StrategyBase = create_strategy(options)
        self.run: RunContext = open_run(options, kind="rollout", strategy=self.strategy)
        self.folder: RunFolder = self.run.folder
        self.link = Link(role, self.strategy.device, self.strategy.comm.timeout)
        self.strategy.comm.failure_of_others = self.link.peers.failure
        try:
            self.prompts = PromptData(self.run)
            load_apart(self.rewards, self.strategy)
            self._rewards = self._rewards_of_training()
            self._keeper = keeper_of(config, self._rewards)
            self._differing = differing_reward_of(config, self._rewards)
            self._start_engine()
            self.collector = self._make_collector()
            if config.eval.majority:
                add_majority(self.collector, self.rewards, self.strategy.comm, config.eval.majority_k)
            self.production = self._make_production() if config.rollout.max_staleness else None
        except Exception as error:
            self.link.peers.report(error)
            raise
        self._actions: dict[str, Callable[[Command], None]] = {
            "begin": self._begin,
            "weights": self._take_weights,
            "rollout": self._roll_out,
            "greedy": self._respond_greedily,
            "evaluate": self._evaluate,
            "save": self._save,
        }
        if self.production is not None:
            self._actions |= {"name": self.production.name, "drop": self.production.drop}

    def fit(self) -> None:
        """Serves until the trainer ends the run. Signals are left to the trainer, which then stops the run."""
        watch = SignalWatch(self)
        try:
            self.link.meet()
            # Not earlier: while connecting, a rank waits in C with nothing to save, so a signal should end it at once.
            watch.start()
            self.link.on_look = partial(self._pass_on, watch)
            if self.production is not None:
                self.production.run(self._carry_out)
            else:
                self._serve()
        except Exception as error:
            self.link.peers.report(error)
            raise
        finally:
            watch.stop()
        self.link.peers.end()

    def _pass_on(self, watch: SignalWatch) -> None:
        """Tells the trainer once of the signal that this rank has received."""
        if watch.received and not self._has_passed_on:
            self._has_passed_on = True
            self.link.put(SIGNAL, str(watch.received).encode())

    def _serve(self) -> None:
        while True:
            with self.strategy.comm.phase("waiting for the trainer"):
                command = self.link.next_command()
            if not self._carry_out(command):
                return

    def _carry_out(self, command: Command) -> bool:
        """Carries out a command of the trainer; returns False at the end of the run."""
        if command["do"] == "stop":
            return False
        self._actions[command["do"]](command)
        return True

    def save(self) -> None:
        """Leaves saving to the trainer."""

    def close(self) -> None:
        """Ends the rewards' processes and the engine, and leaves the process group."""
        self.rewards.close()
        if self._rewards is not self.rewards:
            self._rewards.close()
        self.strategy.close()

    # ---- Commands ----------------------------------------------------------------------------------------------

    def _begin(self, command: Command) -> None:
        self.folder, self.step_index = RunFolder(Path(command["folder"])), command["step"]
        if self.production is not None:
            self.production.begin(command)

    def _save(self, command: Command) -> None:
        """Sends the state of unfinished work, for a checkpoint."""
        assert self.production is not None, "asked for above --rollout.max_staleness 0 alone"
        self.link.answer(to_bytes(self.production.save()))

    def _take_weights(self, command: Command) -> None:
        engine = self.strategy.serving.require_engine()
        with self.strategy.comm.phase("weight sync"):
            expected, weights = self.link.receive_weights()
            engine.update_weights(weights, command["version"], expected=expected)

    def _roll_out(self, command: Command) -> None:
        """Generates and scores this rank's part of a step's samples, as a trainer with an engine does."""
        config, statistics = self.config, Statistics()
        if self._differing is not None:
            self._differing.forget()
        samples = self.collector.sample(
            self._share_of(command),
            step=command["step"],
            group_size=config.group_size,
            temperature=config.temperature,
        )
        rewards = self.collector.score(samples, statistics)
        groups = grouped(samples, rewards, config.group_size, command["step"])
        if self._keeper is not None:
            groups = self._keeper.completed(groups)
        if self._differing is not None:
            groups = self._differing.completed(groups)
        self._answer_groups(groups, statistics)

    def _respond_greedily(self, command: Command) -> None:
        """Responds greedily to this rank's part of a step's prompts, and scores the responses."""
        statistics = Statistics()
        samples = self.collector.sample_greedily(self._share_of(command))
        rewards = self.collector.score(samples, statistics, prefix="greedy/")
        self._answer_groups(grouped(samples, rewards, 1, self.step_index), statistics)

    def _share_of(self, command: Command) -> Prompts:
        """Returns this rank's part of the prompts that a command names."""
        drawn = enumerate(command["prompts"], start=command["first"])
        batch = [(position, self.prompts.train[index]) for position, index in drawn]
        return shard(batch, self.strategy.comm.rank, self.strategy.comm.world)

    def _answer_groups(self, groups: Sequence[ScoredGroup], statistics: Statistics) -> None:
        self.link.answer(
            to_bytes({"groups": [group_state(group) for group in groups], "statistics": statistics.take()})
        )

    def _evaluate(self, command: Command) -> None:
        """Evaluates; unfinished groups wait until it is done."""
        if self.production is not None:
            self.production.finish_scoring()
        with self.strategy.serving.require_engine().set_aside():
            self._answer_evaluation(command)

    def _answer_evaluation(self, command: Command) -> None:
        metrics = self.collector.evaluate(self.prompts.evaluation, **command["settings"])
        self.link.answer(json.dumps(metrics).encode())

    # ---- Set-up ------------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        """Builds the engine; its weights come over the link, so the model here has none."""
        config, serving = self.config, self.strategy.serving
        with self.strategy.comm.phase("starting the engine", local=True):
            policy = load_policy(
                self.run.model_path, materialize=False, trust_remote_code=self.config.trust_remote_code
            )
            if varies_with_length(policy.hf.config):
                fix_for_run(self.run, policy)
            if config.lora.is_on:
                add_adapters(policy.hf, config.lora, seed=config.seed)
                if issubclass(strategy_class(config.strategy), TorchStrategy):  # others send merged weights
                    serve_as_configured(self.strategy, config, policy.hf)
            make = create_recording_engine if config.routing.replay else create_engine
            engine = make(
                serving.factories.get(config.engine, config.engine),
                source=self.strategy.unwrap_model(policy),
                tokenizer=self.run.tokenizer,
                options=self.strategy.options,
                device=self.strategy.device,
                group=serving.group,
            )
        serving.engine = ColocatedEngine(engine, self.run.tokenizer)

    def _rewards_of_training(self) -> RewardSet:
        """Returns rewards of their own for episodes that never stop: these use self.rewards meanwhile."""
        if self.run.workflow is None or not self.config.rollout.max_staleness:
            return self.rewards
        made = RewardSet.from_config(self.config)
        share_models(self.rewards, made)
        return made

    def _make_collector(self) -> Collector:
        if self.run.workflow is not None:
            return collector_of_episodes(self.run.workflow, self.strategy, self.rewards, self.config)
        config = self.config
        return Collector(
            self.strategy,
            self.rewards,
            seed=config.seed,
            max_new_tokens=config.max_new_tokens,
            **sampling_of(config),
        )

    def _make_production(self) -> Production:
        serving, config = self.strategy.serving, self.config
        parts = (config, self.link, serving.require_engine(), serving.group)
        prompts = self.prompts.train
        if isinstance(self.collector, EpisodeCollector):
            made: Production = EpisodeProduction(
                *parts, prompts=prompts, rewards=self._rewards, collector=self.collector
            )
        else:
            made = Production(*parts, prompts=prompts, rewards=self._rewards, collector=self.collector)
        made.keeper = self._keeper
        return made


def _server_options(config: RolloutConfig, role: Role) -> RolloutConfig:
    """Returns the options for a run without a trainer, which opens no folder: the run's folder is the trainer's."""
    return replace(
        config,
        strategy="single" if role.num_rollout == 1 else "ddp",
        output_dir=str(Path(tempfile.gettempdir()) / f"lightrl-rollout-{os.getpid()}"),
        resume="never",
        tp_size=1,
        sp_size=1,
        engine_sleep_level=0,
        canary_every=0,
        compile=False,
        lora=LoraConfig(),
        deepspeed=DeepSpeedConfig(),
        megatron=MegatronConfig(),
    )
