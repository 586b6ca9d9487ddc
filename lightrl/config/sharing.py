"""The options that `--share_prompts` does not go with."""

from __future__ import annotations

from typing import Any


def check_sharing(config: Any) -> None:
    """Raises ValueError for an option that needs whole sequences."""
    reasons = (
        ("exact", config.exact, "the bits of a token depend on how its keys are added up"),
        ("sp_size", config.sp_size > 1, "its ranks split whole sequences"),
        ("routing.replay", config.routing.replay, "the engine's experts are those of whole sequences"),
        ("routing.balance_coef", config.routing.balance_coef, "the statistics of routers are those of whole sequences"),
        ("routing.z_coef", config.routing.z_coef, "the statistics of routers are those of whole sequences"),
    )
    for name, is_refused, reason in reasons:
        if is_refused:
            raise ValueError(f"--share_prompts does not go with --{name}: {reason}. Leave one of them out.")
