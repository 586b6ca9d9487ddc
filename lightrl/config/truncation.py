"""Training on tokens that top-p or top-k left: which engine reports them, and what it does not go with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightrl.config.options import option


@dataclass(kw_only=True)
class TruncationConfig:
    """The part of the vocabulary that responses are drawn from."""

    __slots__ = ()

    top_p: float = option(1.0, above=0, at_most=1, check=lambda config: _check_truncation(config))
    """Draw from the likeliest tokens that together have this probability. 1: from all. The training logprobs are those
    of the same distribution (docs/truncated_sampling.md)."""
    top_k: int = option(0, at_least=0, check=lambda config: _check_truncation(config))
    """Draw from so many of the likeliest tokens. 0: from all."""

    @property
    def is_truncated(self) -> bool:
        """Whether responses are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def engine_path(self) -> str:
        """Name or import path of the engine: with a part of the vocabulary, of one that reports it."""
        config: Any = self
        return _truncated_engine(config) if self.is_truncated else config.engine


def _truncated_engine(config: Any) -> str:
    if config.exact:
        return "lightrl.exact.truncated:build_exact_truncated_engine"
    return "lightrl.engines.native.truncated:build_truncated_engine"


def _check_truncation(config: Any) -> None:
    """Raises ValueError for options with which the trainer would compute logprobs of another distribution."""
    reasons = (
        ("engine", config.engine != "native", "only the native engine reports the tokens that were left"),
        ("tp_size", config.tp_size > 1, "its ranks split the vocabulary"),
        ("sp_size", config.sp_size > 1, "its ranks split the tokens of a response"),
        ("strategy", config.strategy == "megatron", "its ranks split the vocabulary"),
        ("share_prompts", config.share_prompts, "its packs do not hold the tokens that were left"),
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
