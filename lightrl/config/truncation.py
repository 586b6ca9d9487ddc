"""What `--top_p` and `--top_k` of training do not go with, and the engine that reports the tokens which they left."""

from __future__ import annotations

from typing import Any


def truncated_engine(config: Any) -> str:
    """Returns the import path of the engine that reports the tokens to draw from."""
    if config.exact:
        return "lightrl.exact.engine:build_exact_truncated_engine"
    return "lightrl.engines.native.truncated:build_truncated_engine"


def check_truncation(config: Any) -> None:
    """Raises ValueError for options with which the trainer would compute logprobs of another distribution."""
    reasons = (
        ("engine", config.engine != "native", "only the native engine reports the tokens that were left"),
        ("tp_size", config.tp_size > 1, "its ranks split the vocabulary"),
        ("sp_size", config.sp_size > 1, "its ranks split the tokens of a response"),
        ("strategy", config.strategy == "megatron", "its ranks split the vocabulary"),
        ("share_prompts", config.share_prompts is True, "its packs do not hold the tokens that were left"),
        ("routing.replay", config.routing.replay, "the engine that records experts does not report them"),
        ("rollout_ranks", config.rollout_ranks > 0, "ranks that only generate do not send them"),
        ("rollout.workflow", bool(config.rollout.workflow), "an episode does not keep them"),
        ("rollout.max_staleness", config.rollout.is_scheduled, "what is under way does not keep them"),
        ("teacher_model", bool(getattr(config, "teacher_model", "")), "the teacher judges the whole vocabulary"),
    )
    for name, is_refused, reason in reasons:
        if is_refused:
            raise ValueError(
                f"--top_p {config.top_p:g} and --top_k {config.top_k} do not go with --{name}: {reason}. Leave one of "
                "them out, or use --eval.top_p and --eval.top_k, which change the evaluation alone."
            )
