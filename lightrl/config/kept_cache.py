"""The options that `--rollout.keep_cache` does not go with, and the engine that it asks for."""

from __future__ import annotations

from typing import Any

from lightrl.config.options import refuse_beside

KEEPING_ENGINE = "lightrl.engines.native.kept_rows:build_keeping_engine"


def check_keep_cache(config: Any) -> None:
    """Raises ValueError for a run that leaves no sample under way, or whose engine cannot put its keys back."""
    if not config.rollout.over_issue:
        raise ValueError(
            "--rollout.keep_cache does nothing without --rollout.over_issue: no sample goes on in another step."
        )
    reasons = (
        (f"engine {config.engine}", config.engine != "native", "only the native engine can put them back"),
        ("exact True", config.exact, "the trainer computes a sample under one set of weights"),
        ("engine_tp_size", config.engine_tp_size > 1, "only the first rank of a group would have them"),
        ("rollout_ranks", config.rollout_ranks > 0, "scripts/replay.py, which repeats such a run, does not have them"),
        ("rollout.partial False", not config.rollout.partial, "samples begin again at their prompts"),
        ("routing.replay", config.routing.replay, "experts are chosen anew for every token of a sample that goes on"),
        ("native.lookup", config.native.lookup > 0, "the engine that guesses computes them anew"),
    )
    refuse_beside("rollout.keep_cache", reasons)
