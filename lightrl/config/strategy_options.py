"""What a strategy reads, from our configs or from another trainer's Namespace."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightrl.config.parsing import option_names
from lightrl.config.runs import RunConfig
from lightrl.config.sections import (
    CheckpointConfig,
    DeepSpeedConfig,
    DistributedConfig,
    FSDPConfig,
    NativeEngineConfig,
    OptimConfig,
)
from lightrl.config.values import check_at_least_one, check_choices

logger = logging.getLogger(__name__)

# Names that other SPMD trainers give to our options, so that their argparse.Namespace works as it is.
_FOREIGN_NAMES = {
    "actor_learning_rate": "lr",
    "critic_learning_rate": "critic_lr",
    "adam_betas": "optim.betas",
    "betas": "optim.betas",
    "l2": "optim.weight_decay",
    "weight_decay": "optim.weight_decay",
    "lr_warmup_ratio": "optim.warmup_ratio",
    "lr_warmup_steps": "optim.warmup_steps",
    "lr_scheduler": "optim.schedule",
    "engine_type": "engine",
}


@dataclass(kw_only=True, slots=True)
class StrategyOptions:
    """What a strategy reads; taken from any config, Namespace or dict that has these names."""

    seed: int = 0
    lr: float = 1e-4
    critic_lr: float = 1e-4
    critic_warmup_steps: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    compile: bool = False
    tp_size: int = 1
    sp_size: int = 1
    engine: str = "native"
    engine_tp_size: int = 1
    engine_mem_fraction: float = 0.4
    engine_args: tuple[str, ...] = ()
    engine_sleep_level: Literal[1, 2] = 1
    sync_bucket_mb: int = 512
    canary_every: int = 50
    offload_while_generating: bool = False
    trust_remote_code: bool = False
    exact_batches: bool = False
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    native: NativeEngineConfig = field(default_factory=NativeEngineConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @classmethod
    def from_args(cls, args: Any) -> StrategyOptions:
        """A run's config gives all its fields; a Namespace or dict the names we know, and a warning for the rest."""
        if isinstance(args, cls):
            return args
        if isinstance(args, RunConfig):
            names = [item.name for item in dataclasses.fields(cls) if hasattr(args, item.name)]
            return cls(exact_batches=True, **{name: getattr(args, name) for name in names})
        options = cls()
        given = _as_mapping(args)
        unknown = [name for name, value in given.items() if not options.set_option(name, value)]
        if unknown:
            logger.warning("Strategy options that lightrl does not read: %s.", ", ".join(sorted(unknown)))
        check_choices(options)
        check_at_least_one({"tp_size": options.tp_size, "sp_size": options.sp_size})
        return options

    def set_option(self, name: str, value: Any) -> bool:
        """Sets a field by its own, its dotted, or a foreign name; False if there is none that takes the value."""
        path = _FOREIGN_NAMES.get(name, name)
        if path not in set(option_names(type(self))) | {item.name for item in dataclasses.fields(self)}:
            return False
        *groups, last = path.split(".")
        target: Any = self
        for group in groups:
            target = getattr(target, group)
        if path == "optim.schedule":
            value = _schedule_name(value)
        current = getattr(target, last)
        if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
            value = dataclasses.replace(current, **value)  # type: ignore[type-var]
        if dataclasses.is_dataclass(current) and not isinstance(value, type(current)):
            return False  # such as another trainer's switch of that name
        setattr(target, last, value)
        return True


def _as_mapping(args: Any) -> dict[str, Any]:
    if args is None:
        return {}
    if isinstance(args, Mapping):
        return dict(args)
    if dataclasses.is_dataclass(args):
        return {item.name: getattr(args, item.name) for item in dataclasses.fields(args)}
    return dict(vars(args))


def _schedule_name(name: str) -> str:
    """Ours, or the name that transformers gives to the same curve."""
    known = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    known |= {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
    if name not in known:
        raise ValueError(f"Unknown learning-rate schedule {name!r}. Choose one of {', '.join(known)}.")
    return known[name]
