"""Option names of other SPMD trainers, so that their argparse.Namespace works as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL_NAMES = ("pretrain", "model", "model_name_or_path", "pretrained_model_name_or_path")  # no options: a folder
_NAMES = {
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
    "engine_mem_util": "engine_mem_fraction",
    "zero_stage": "deepspeed.zero_stage",
    "adam_offload": "deepspeed.offload_optimizer",
    "fsdp_cpu_offload": "fsdp.cpu_offload",
}


def native_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options under lightrl's names, dotted where they are in a group; others stay as they are."""
    options = {_NAMES.get(name, name): value for name, value in given.items() if name not in MODEL_NAMES}
    if "optim.schedule" in options:
        options["optim.schedule"] = _schedule_name(options["optim.schedule"])
    if "bf16" in options:
        options.setdefault("dtype", "bfloat16" if options["bf16"] else "float32")
        del options["bf16"]
    if "enable_engine_sleep" in options and not options.pop("enable_engine_sleep"):
        options["engine_sleep_level"] = 0
    return options


def _schedule_name(name: str) -> str:
    """Returns our name of a schedule, also for the name that transformers gives to the same curve."""
    known = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    known |= {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
    if name not in known:
        raise ValueError(f"Unknown learning-rate schedule {name!r}. Choose one of {', '.join(known)}.")
    return known[name]
