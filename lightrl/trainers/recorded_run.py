"""Repeats an asynchronous run from its schedule, on ranks that train and generate in turn, or a step of GRPO or PPO."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lightrl.config import GRPOConfig, PPOConfig, RolloutConfig, exit_with_user_error, parse_config
from lightrl.config.yaml_text import read_yaml
from lightrl.rollout.majority import add_majority
from lightrl.rollout.recorded_schedule import read_schedule
from lightrl.rollout.replayed_collector import ReplayedCollector
from lightrl.rollout.replayed_episodes import ReplayedEpisodes
from lightrl.sharing.model import share_by_itself
from lightrl.trainers.earlier_run import config_file
from lightrl.trainers.fit import Trainer, build_trainer, run_program
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.ppo import PPOTrainer
from lightrl.trainers.repeated_step import repeat_step
from lightrl.trainers.scheduled import YoungUpdates

# A repeated run neither uploads its models nor appears in the services that the recorded run reported to.
_HANDS_NOTHING_ON = ("--hub.push=", "--log.to=")


class Replay(Trainer):
    """Mixin for a trainer's class that makes its samples as a recorded run made them."""

    made_by = None  # the recorded run's options decide what is learned; its ranks are not needed
    prompts: Any  # the trainer's PromptData
    collector: Any
    rewards: Any
    updates: Any  # of the trainer

    def __init__(self, config: RolloutConfig, recorded: Path) -> None:
        schedule = read_schedule(recorded)
        if config.engine_tp_size > 1:
            raise ValueError("A run is repeated by engines of one rank: add --engine_tp_size 1.")
        super().__init__(config)
        if config.rollout.max_token_staleness:
            self.updates = YoungUpdates(self.run, self.statistics)
        if config.eval.majority:
            add_majority(self.collector, self.rewards, self.strategy.comm, config.eval.majority_k)
        make = ReplayedCollector if self.run.workflow is None else ReplayedEpisodes
        self.collector = make(self.collector, self.strategy, schedule, config=config, prompts=self.prompts.train)

    def close(self) -> None:
        """Ends the unfinished episodes, and then the run."""
        if isinstance(self.collector, ReplayedEpisodes):
            self.collector.close()
        super().close()


class ReplayedGRPO(Replay, GRPOTrainer):
    """Repeats a run of GRPO."""


class ReplayedPPO(Replay, PPOTrainer):
    """Repeats a run of PPO."""


def replay(arguments: Sequence[str]) -> int:
    """Repeats the run in the folder given first, or its step --step N; other arguments override its config.yaml."""
    if arguments and arguments[0] in ("-h", "--help"):
        _parser().parse_args(["--help"])
    recorded = Path(arguments[0] if arguments else "")
    try:
        saved = read_yaml(config_file(recorded), "it")
    except ValueError as error:
        exit_with_user_error(error)
    if "batch_size" in saved:
        text = f"{recorded} learned from answers in its data: only runs of GRPO and PPO can be repeated. To take a step"
        exit_with_user_error(ValueError(f"{text} again, give its command --output_dir NEW --resume CHECKPOINT."))
    is_ppo = "critic" in saved
    kind: type[RolloutConfig] = PPOConfig if is_ppo else GRPOConfig
    own, options = _parser().parse_known_args(arguments)
    if own.debug and not own.step:
        exit_with_user_error(ValueError("--debug stops before one step: give --step N too."))

    def read_options(added: Sequence[str]) -> RolloutConfig:
        return parse_config(kind, ["--config", str(recorded / "config.yaml"), *added, *options])

    if own.step:
        ordinary = PPOTrainer if is_ppo else GRPOTrainer
        return repeat_step(
            partial(build_trainer, ordinary), read_options, recorded, step=own.step, is_debugged=own.debug
        )
    config = read_options(list(_HANDS_NOTHING_ON))
    if not config.output_dir or Path(config.output_dir).resolve() == recorded.resolve():
        text = "Give --output_dir: a folder for the repeated run, beside the recorded one"
        exit_with_user_error(ValueError(f"{text}; or --step N to repeat one step."))
    run_program(partial(_repeating, ReplayedPPO if is_ppo else ReplayedGRPO, recorded), config)
    return 0


def _repeating(kind: type[Replay], recorded: Path, config: RolloutConfig) -> Replay:
    # By name, because that module imports trainers.
    make: Any = resolve_name("lightrl.sharing.run:sharing")(kind) if config.share_prompts is True else kind
    trainer: Replay = make(config, recorded=recorded)
    if config.may_share_prompts:  # as in the recorded run, where build_trainer() did it
        share_by_itself(trainer)
    return trainer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightrl replay",
        usage="lightrl replay RUN --output_dir NEW [OPTIONS], or lightrl replay RUN --step N [--debug]",
        description="Repeat a recorded asynchronous run into a folder of its own, or one step of a GRPO or PPO run.",
        epilog="OPTIONS are those of `lightrl train grpo` or `ppo`; they win over the config.yaml of the run.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of the recorded run; it comes first")
    parser.add_argument("--step", type=_step, default=0, metavar="N", help="repeat this step and compare its numbers")
    parser.add_argument("--debug", action="store_true", help="with --step: enter pdb before the step")
    return parser


def _step(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}: steps count from 1")
    return number
