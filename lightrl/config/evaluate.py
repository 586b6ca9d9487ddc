"""The options of an evaluation without training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from lightrl.config.options import option, option_types, without
from lightrl.config.runs import GRPOConfig, PPOConfig, RolloutConfig
from lightrl.config.strategy import CriticTrainingConfig

OF_STEPS = (  # options that change how a trainer's steps come about, by their fields
    "exact",
    "rollout_ranks",
    "rollout.record",
    "rollout.from_",
    "data.curriculum",
    "rollout.over_issue",
    "rollout.max_staleness",
    "rollout.filter",
)
_OF_EPISODES = ("workflow", "workflow_args", "max_turns", "max_context_tokens", "episode_timeout_s")
_READ = {f"rollout.{name}" for name in _OF_EPISODES}
_BESIDE = (  # beginnings of further options that a training's file loses: its folder, its services, its steps
    *("output_dir", "resume", "hub.", "log.to", "profile", "ema_decay", "eval.best"),
    *("top_p", "top_k", "num_minibatches", "micro_batch_size", "exact_tile_tokens", "routing.", "rollout."),
)


@dataclass(kw_only=True, slots=True)
@without(CriticTrainingConfig)
class EvaluateConfig(RolloutConfig):
    """Evaluate a language model on sampled responses. Options that only training uses do nothing or are refused."""

    micro_batch_size: int = option(1, at_least=1, resume="free")
    """Does nothing in an evaluation."""

    def check(self) -> None:
        """Takes the data to evaluate on for those that are read first; refuses settings of training's responses."""
        if self.is_truncated:
            raise ValueError("--top_p and --top_k apply to training. Give --eval.top_p and --eval.top_k.")
        for name in filter(lambda name: attrgetter(name)(self), (*OF_STEPS, "eval.best")):
            raise ValueError(f"--{name.rstrip('_')} applies to training: an evaluation takes no steps. Leave it out.")
        self.train_data = self.eval_data or self.train_data


def left_out(options: Mapping[str, Any], *, has_other_model: bool) -> list[str]:
    """Returns the options of a YAML file that an evaluation leaves out; none unless the file is a training's.

    It is if it has an option that only training has, such as those of the algorithm.

    has_other_model: whether the file's model is replaced. Then its adapter is too: a trained model contains it.
    """
    own, trained = option_types(EvaluateConfig), {**option_types(GRPOConfig), **option_types(PPOConfig)}
    of_training = [
        name for name, value in options.items() if (name in OF_STEPS and value) or (name in trained and name not in own)
    ]
    dropped = (*_BESIDE, "lora.") if has_other_model and options.get("lora.path") else _BESIDE
    read = {*_READ, "rollout.max_groups"} if options.get("rollout.workflow") else _READ
    beside = [name for name in options if name.startswith(dropped) and name not in {*read, *of_training}]
    return [*of_training, *beside] if of_training else []
