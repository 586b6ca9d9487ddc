"""The options that `--native.lookup` does not go with; adapters.py has those of LoRA."""

from __future__ import annotations

from typing import Any


def check_lookup(config: Any) -> None:
    """Raises ValueError for an option that guessing tokens (--native.lookup) cannot be combined with."""
    is_truncated = getattr(config, "is_truncated", False)
    reasons = (
        (f"engine {config.engine}", config.engine != "native", "only the native engine guesses"),
        ("exact", config.exact, "the bits of a token depend on how wide its forward is"),
        ("routing.replay", config.routing.replay, "the engine that records experts draws one token at a time"),
        ("top_p and --top_k", is_truncated, "the engine that reports what was left draws one token at a time"),
    )
    for name, is_refused, reason in reasons:
        if is_refused:
            raise ValueError(f"--native.lookup does not go with --{name}: {reason}. Leave one of them out.")
