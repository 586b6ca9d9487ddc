"""The options that `--share_prompts True` does not go with."""

from __future__ import annotations

from typing import Any

from lightrl.config.options import refuse_beside


def check_sharing(config: Any) -> None:
    """Raises ValueError for an option that needs whole sequences."""
    if config.share_prompts:
        refuse_beside("share_prompts", reasons_against(config))


def reasons_against(config: Any) -> tuple[tuple[str, bool, str], ...]:
    """Returns options that need whole sequences, whether the config has each on, and why; may_share_prompts has all."""
    return (
        ("exact", config.exact, "the bits of a token depend on how its keys are added up"),
        ("strategy megatron", config.strategy == "megatron", "its own layers attend to whole sequences"),
        ("routing.replay", config.routing.replay, "the engine's experts are those of whole sequences"),
        ("routing.balance_coef", config.routing.balance_coef, "the statistics of routers are those of whole sequences"),
        ("routing.z_coef", config.routing.z_coef, "the statistics of routers are those of whole sequences"),
    )
