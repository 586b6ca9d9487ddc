"""Refuses, before weights are loaded, options that a run cannot change when it begins from another run's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightrl.config import (
    DPOConfig,
    GRPOConfig,
    OfflineConfig,
    PPOConfig,
    RMConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
)
from lightrl.config.command_line import flatten
from lightrl.config.options import as_dict
from lightrl.config.yaml_text import read_yaml
from lightrl.strategy.saving.state_reader import load_object

_KINDS: dict[str, type[RolloutConfig] | type[OfflineConfig]] = {
    "GRPO": GRPOConfig,
    "PPO": PPOConfig,
    "SFT": SFTConfig,
    "DPO": DPOConfig,
    "a reward model": RMConfig,
}
_CAN_CONTINUE = ("PPO", "GRPO")  # without the critic, GRPO goes on with the policy
_IN_CHECKPOINTS = {
    "seed": "the order of its data depends on it",
    "optim.name": "it holds the states of that optimizer",
    "optim.schedule_unit": "its schedule has counted in that unit",
    "lora.rank": "it holds weights of other shapes",
    "critic.shared_backbone": "it holds a critic of another form",
}


def require_same_kind(run: str, saved: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ValueError if a run was started by the program of another kind of training.

    Args:
        run: what the error names.
        saved: the content of the run's config.yaml, perhaps of an earlier version with fewer options.
    """
    before, now = kind_of(set(saved)), kind_of({item.name for item in fields(config)})
    if before and before != now and (before, now) != _CAN_CONTINUE:
        raise ValueError(
            f"{run} comes from a run of {before}, which a run of {now} cannot continue. Start anew from its model: "
            "give --model the final/ of its folder, and another --output_dir."
        )


def require_same_roles(run: str, saved: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ValueError if --rollout_ranks is switched on or off in a run with a bound on staleness."""
    before, now = dict(flatten(saved)), dict(flatten(as_dict(config)))
    old, new = before.get("rollout_ranks", 0), now.get("rollout_ranks", 0)
    bound = before.get("rollout.max_staleness", 0) and now.get("rollout.max_staleness", 0)
    if bool(old) != bool(new) and bound:
        raise ValueError(
            f"{run} comes from a run with --rollout_ranks {old}, and this run has {new}: with --rollout.max_staleness "
            f"{bound}, ranks that only generate store unfinished samples in another form than ranks that also train. "
            f"Give --rollout_ranks {f'{old}, or another number above 0' if old else 0}."
        )


def kind_of(options: set[str]) -> str:
    """Returns the kind of training whose options match these best; empty if these are too few to tell."""
    known = {kind: {item.name for item in fields(options_of)} for kind, options_of in _KINDS.items()}
    best = min(known, key=lambda kind: len(known[kind] ^ options))
    return best if len(options) > len(known[best]) / 2 else ""


def require_continuable(checkpoint: Path, config: RunConfig) -> None:
    """Raises ValueError for options with which no run can continue this checkpoint.

    Without the config.yaml of its run, as in a copy of a checkpoint alone, whether it fits shows when it is loaded.
    """
    try:
        saved = read_yaml(checkpoint.parent.parent / "config.yaml", "it")
        before, now = dict(flatten(saved)), dict(flatten(as_dict(config)))
    except (OSError, ValueError, AttributeError):  # the last: it holds no options
        return
    require_same_kind(f"--resume {checkpoint}", saved, config)
    require_same_roles(f"--resume {checkpoint}", saved, config)
    for name, reason in _IN_CHECKPOINTS.items():
        old, new = before.get(name), now.get(name)
        is_changed = old not in (None, new) and (name in now or old)  # GRPO ignores a separate critic
        if not is_changed or _is_left_to_the_load(name, before, now):
            continue
        if name != "seed" or not _draws_without_seed(checkpoint):
            raise _is_fixed(checkpoint, name, old, new, reason)


def _is_fixed(checkpoint: Path, name: str, old: object, new: object, reason: str) -> ValueError:
    """Returns the error about an option that a checkpoint fixes; new is None if this kind of run does not have it."""
    given, remedy = new, f"Give the --{name} of that run, or start"
    if new is None:
        given, remedy = "no such option", "Start"
    return ValueError(
        f"--resume {checkpoint} comes from a run with --{name} {old}, and this run has {given}: {reason}. {remedy} "
        "anew from its model: --model with final/ of its folder."
    )


def _draws_without_seed(checkpoint: Path) -> bool:
    """Returns whether the checkpoint has no sampler with a seed, as those of a trainer of one's own may have none."""
    if not (checkpoint / "state.pt").is_file():  # a strategy of a user may keep it elsewhere
        return False
    state = load_object(checkpoint / "state.pt").get("client_state") or {}
    return "seed" not in state.get("sampler", {})


def _is_left_to_the_load(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether the load decides: an adapter file has its own rank, and a curriculum draws without the seed."""
    others = {"lora.rank": "lora.path", "seed": "data.curriculum"}
    return name in others and any(options.get(others[name]) for options in (before, now))
