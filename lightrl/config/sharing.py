"""The runs that share prompts by themselves, and the options that `--share_prompts True` does not go with."""

from __future__ import annotations

from typing import Any

_TIMED = ("auto", "single", "ddp", "fsdp")  # strategies that auto shares with


def may_share_prompts(config: Any) -> bool:
    """Returns whether a run shares prompts by itself if its device is a CPU and its models allow it.

    It is where sharing has been timed, and where no option needs whole sequences.
    """
    return bool(
        getattr(config, "share_prompts", False) == "auto"
        and config.dtype == "float32"
        and config.strategy in _TIMED
        and config.distributed.device != "cuda"
        and not (config.compile or config.tp_size > 1 or config.is_truncated)
        and not any(is_refused for _, is_refused, _ in _reasons(config))
    )


def check_sharing(config: Any) -> None:
    """Raises ValueError for an option that needs whole sequences."""
    for name, is_refused, reason in _reasons(config) if config.share_prompts else ():
        if is_refused:
            raise ValueError(f"--share_prompts does not go with --{name}: {reason}. Leave one of them out.")


def _reasons(config: Any) -> tuple[tuple[str, bool, str], ...]:
    """Returns option, whether the config has it on, and what it needs."""
    return (
        ("exact", config.exact, "the bits of a token depend on how its keys are added up"),
        ("strategy megatron", config.strategy == "megatron", "its own layers attend to whole sequences"),
        ("routing.replay", config.routing.replay, "the engine's experts are those of whole sequences"),
        ("routing.balance_coef", config.routing.balance_coef, "the statistics of routers are those of whole sequences"),
        ("routing.z_coef", config.routing.z_coef, "the statistics of routers are those of whole sequences"),
    )
